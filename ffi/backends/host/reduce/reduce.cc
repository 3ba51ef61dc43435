#include "ffi/backends/host/reduce/reduce.h"

namespace jaxcomm {

ReduceKernels FindReduceKernels(DataType dtype, ReduceOp op) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return avx512::FindReduceKernels(dtype, op);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return avx2::FindReduceKernels(dtype, op);
  }
#endif
  return baseline::FindReduceKernels(dtype, op);
}

}  // namespace jaxcomm
