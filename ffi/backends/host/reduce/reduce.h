// Element-wise reductions over the operands of several ranks, in rank order.
// bfloat16, float16 and float8 accumulate in float32.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_REDUCE_REDUCE_H_
#define JAXCOMM_FFI_BACKENDS_HOST_REDUCE_REDUCE_H_

// Most of these are for reduce_kernels.inc, which includes nothing itself.
#include <algorithm>
#include <array>
#include <cfenv>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "ffi/core/dtype.h"

namespace jaxcomm {

struct ReduceKernels {
  // out[i] = op over k of in[k][i].
  void (*reduce)(void* out, const void* const* in, int count_in, int64_t elements);
  // out[k][i] = op over j <= k of in[j][i].
  void (*running)(void* const* out, const void* const* in, int count_in,
                  int64_t elements);
  // out[i] = the identity of op.
  void (*identity)(void* out, int64_t elements);
};

// The kernels for the widest instructions this processor has. Null members if
// the type cannot be reduced.
ReduceKernels FindReduceKernels(DataType dtype, ReduceOp op);

namespace baseline {
ReduceKernels FindReduceKernels(DataType dtype, ReduceOp op);
}
namespace avx2 {
ReduceKernels FindReduceKernels(DataType dtype, ReduceOp op);
}
namespace avx512 {
ReduceKernels FindReduceKernels(DataType dtype, ReduceOp op);
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_REDUCE_REDUCE_H_
