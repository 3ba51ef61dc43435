// Carries out the moves of a plan between buffers of one address space.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_EXECUTE_H_
#define JAXCOMM_FFI_BACKENDS_HOST_EXECUTE_H_

#include <atomic>
#include <memory>
#include <vector>

#include "ffi/backends/host/host_plan.h"
#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

// The buffers of all ranks at one call: operands[rank][leaf].
struct GroupBuffers {
  const void* const* const* operands;
  void* const* const* results;
};

// Blocks of moves offered to several threads, which claim them one at a time: work is
// claimed, never assigned, so a helper that is stuck behind other work costs nothing.
class SharedBlocks {
 public:
  virtual ~SharedBlocks() = default;
  // Moves blocks until none is left to claim. May be called by a helper that starts
  // long after the last block is done.
  virtual void Work() = 0;
};

// Where a call in progress shows its blocks to threads that wait for it.
using Offer = std::atomic<SharedBlocks*>;

// Runs the given moves of `plan` to the end. Shares large moves with `waiting` threads
// that look at `offer`, and with `scheduler`'s threads. Waits only for blocks that
// another thread is already moving. Keep the offered blocks that it returns for as long
// as a thread may look at `offer`.
std::shared_ptr<SharedBlocks> RunMoves(const CallSite& site, const HostPlan& plan,
                                       const std::vector<int>& moves,
                                       const GroupBuffers& buffers,
                                       Scheduler* scheduler, Offer* offer, int waiting);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_EXECUTE_H_
