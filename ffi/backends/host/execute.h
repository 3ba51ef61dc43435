// Carries out the moves of a plan between buffers of one address space.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_EXECUTE_H_
#define JAXCOMM_FFI_BACKENDS_HOST_EXECUTE_H_

#include <vector>

#include "ffi/call_site.h"
#include "ffi/communicator.h"
#include "ffi/plan.h"

namespace jaxcomm {

// The buffers of all ranks at one call: operands[rank][leaf].
struct GroupBuffers {
  const void* const* const* operands;
  void* const* const* results;
};

// Runs the given moves of `plan` to the end. Large moves are shared with
// `scheduler`'s threads: blocks are claimed, never assigned, so a helper that
// is stuck behind other work costs nothing. Waits only for blocks that another
// thread is already moving.
void RunMoves(const CallSite& site, const Plan& plan, const std::vector<int>& moves,
              const GroupBuffers& buffers, Scheduler* scheduler);

// Fails if the plan reduces a type that cannot be reduced.
Status CheckReducible(const CallSite& site, const Plan& plan);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_EXECUTE_H_
