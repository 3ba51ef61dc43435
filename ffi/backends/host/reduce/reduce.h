// Element-wise reductions over the operands of several ranks, by a binary tree: those
// of neighbours are combined first, then what neighbours made of theirs. bfloat16,
// float16 and float8 accumulate in float32.
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
  // out[i] = op over k of in[k][i]. The last goes up the tree as it is where it has no
  // neighbour, so that each power of two of inputs, from a multiple of it on, is a
  // subtree: it can be reduced elsewhere without a change of the result.
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
