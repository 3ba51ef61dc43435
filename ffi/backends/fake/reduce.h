// Arithmetic of the reductions.
#ifndef JAXCOMM_FFI_BACKENDS_FAKE_REDUCE_H_
#define JAXCOMM_FFI_BACKENDS_FAKE_REDUCE_H_

#include <cstddef>

#include "ffi/backends/nccl/nccl_api.h"

namespace jaxcomm::fake {

// Bytes of an element; 0 for no type of ours.
size_t TypeBytes(nccl::Type type);

bool IsRedOp(nccl::RedOp op);

// to[i] = to[i] op from[i]. 16-bit floats are widened for each step and rounded after
// it, and minimum and maximum pass over NaN, as NCCL's kernels do.
void Accumulate(nccl::Type type, nccl::RedOp op, const void* from, void* to,
                size_t count);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_FFI_BACKENDS_FAKE_REDUCE_H_
