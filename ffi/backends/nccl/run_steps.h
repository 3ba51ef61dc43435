// Giving a stream the steps of a collective.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_RUN_STEPS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_RUN_STEPS_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "ffi/backends/nccl/library.h"
#include "ffi/backends/nccl/peer_plan.h"
#include "ffi/backends/nccl/steps.h"
#include "ffi/core/communicator.h"
#include "ffi/core/status.h"

namespace jaxcomm {

// Tells communicators of this process apart.
uint64_t NextCommunicatorNumber();

// The steps of a rank at a call site, made at its first call and kept as long as the
// site. `number`: of the communicator.
Status FindSteps(const NcclLibrary& library, CallSite& site, uint64_t number, int size,
                 int rank, const Steps** steps);

// The same as copies between devices of this process, for all ranks.
std::shared_ptr<const PeerPlan> FindPeerPlan(CallSite& site, uint64_t number, int size);

// A copy within the rank, or zeros.
Status RunLocalStep(const NcclLibrary& library, const Step& step,
                    const void* const* operands, void* const* results,
                    cuda::Stream stream);

// What to make of a result of NCCL's function of this name.
using Settle = std::function<Status(nccl::Result, const char*)>;

// The copies within the rank, then NCCL's calls: more than one as a group.
Status RunSteps(const NcclLibrary& library, const Steps& steps, const Call& call,
                nccl::Comm comm, cuda::Stream stream, const Settle& settle);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_RUN_STEPS_H_
