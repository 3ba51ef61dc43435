#include "ffi/backends/host/reduce/reduce.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                      \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif

namespace jaxcomm::avx512 {
#include "ffi/backends/host/reduce/reduce_kernels.inc"
}  // namespace jaxcomm::avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // defined(__x86_64__)
