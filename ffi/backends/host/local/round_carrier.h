// Takes the rounds of a group that spans processes to the other processes.
//
// The last rank of a process to come takes all of them along: in its handler for a
// moment, then on the process set's thread. A round takes one transfer, or two where
// the plan follows from operand values: the first brings every process these values.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_ROUND_CARRIER_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_ROUND_CARRIER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "ffi/backends/host/arena/arena.h"
#include "ffi/backends/host/arena/stream_plan.h"
#include "ffi/backends/host/local/group_members.h"
#include "ffi/backends/host/local/local_round.h"
#include "ffi/backends/host/local/peer_failure.h"
#include "ffi/base/status.h"
#include "ffi/core/communicator.h"
#include "ffi/core/derived_cache.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

class RoundCarrier {
 public:
  // Ends a round. `rank` is the one whose handler this is; -1: no rank's.
  using Complete =
      std::function<void(std::unique_ptr<LocalRound> round, int rank, Status status)>;

  RoundCarrier(const HostContext& context, const GroupMembers& members,
               Complete complete);

  // `helpers` ranks of the round look for blocks to move.
  void Carry(int rank, const Call& call, std::unique_ptr<LocalRound> round,
             int helpers);
  // Fails, soon, what the process set's thread carries, and what it is given later.
  // The caller then calls ProcessSet::Abort().
  void Close(const Status& reason);

  // Rounds that the process set's thread carries.
  int64_t pending() const;

 private:
  struct Passage;

  void BeginMoves(Passage& passage, Scheduler* scheduler, int helpers);
  void BeginExchange(Passage& passage);
  // After a transfer. Returns how the round ended, or none if the next transfer has
  // begun.
  std::optional<Status> Advance(Passage& passage);
  // Hands the passage to the process set's thread.
  void Continue(std::shared_ptr<Passage> passage);
  CrossingRequest RequestOf(const Passage& passage, uint64_t step) const;

  const HostContext& context_;
  const GroupMembers& members_;
  const PeerFailure failure_;
  const Complete complete_;

  mutable Mutex mutex_;
  DerivedCache<StreamPlan> streams_ GUARDED_BY(mutex_);
  int64_t pending_ GUARDED_BY(mutex_) = 0;
  Status closed_ GUARDED_BY(mutex_);
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_ROUND_CARRIER_H_
