// Giving a stream the steps of a collective.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_RUN_STEPS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_RUN_STEPS_H_

#include <functional>

#include "ffi/backends/nccl/library.h"
#include "ffi/backends/nccl/steps.h"
#include "ffi/base/status.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

// Gives `stream` a copy within the rank, or zeros.
Status RunLocalStep(const NcclLibrary& library, const Step& step,
                    const void* const* operands, void* const* results,
                    cuda::Stream stream);

// Given what NCCL's function of this name returned, waits until the call is over if it
// is in progress, and returns how it ended.
using FinishCall = std::function<Status(nccl::Result, const char*)>;

// Gives `stream` the copies within the rank, then NCCL's calls: more than one as a
// group.
Status RunSteps(const NcclLibrary& library, const Steps& steps, const Call& call,
                nccl::Comm comm, cuda::Stream stream, const FinishCall& finish);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_RUN_STEPS_H_
