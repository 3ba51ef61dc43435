// Arithmetic of the reductions.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_REDUCE_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_REDUCE_H_

#include <cstddef>

#include "ffi/backends/nccl/nccl_api.h"

namespace jaxcomm::fake {

// Bytes of an element; 0 for no type of ours.
size_t TypeBytes(nccl::Type type);

// Whether it has the reduction for the type: averages are for the wide floats alone.
bool IsRedOp(nccl::RedOp op, nccl::Type type);

// What an average does to the operand of each rank before it adds them.
void Premultiply(nccl::Type type, int ranks, void* data, size_t count);

// to[i] = to[i] op from[i]. 16-bit floats are widened for each step and rounded after
// it, and minimum and maximum pass over NaN, as NCCL's kernels do.
void Accumulate(nccl::Type type, nccl::RedOp op, const void* from, void* to,
                size_t count);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_REDUCE_H_
