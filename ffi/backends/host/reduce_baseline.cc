#include <algorithm>
#include <cfenv>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "ffi/backends/host/reduce.h"

namespace jaxcomm::baseline {
#include "ffi/backends/host/reduce_kernels.inc"
}  // namespace jaxcomm::baseline
