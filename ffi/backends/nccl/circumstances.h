// The facts that help to find out why a communicator cannot be made.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_CIRCUMSTANCES_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_CIRCUMSTANCES_H_

#include "ffi/backends/nccl/library.h"
#include "ffi/base/status.h"

namespace jaxcomm {

// Adds to an error of creation: which NCCL, its variables, live communicators and free
// memory. `context`: of a device whose memory is of interest, or null.
Status WithCircumstances(const NcclLibrary& library, const Status& status,
                         cuda::Context context);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_CIRCUMSTANCES_H_
