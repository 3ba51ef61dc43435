#include "ffi/backends/host/reduce/reduce.h"

namespace jaxcomm::baseline {
#include "ffi/backends/host/reduce/reduce_kernels.inc"
}  // namespace jaxcomm::baseline
