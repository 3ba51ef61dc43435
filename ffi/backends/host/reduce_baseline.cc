#include "ffi/backends/host/reduce.h"

namespace jaxcomm::baseline {
#include "ffi/backends/host/reduce_kernels.inc"
}  // namespace jaxcomm::baseline
