// The ranks of this process, as every engine needs them.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_LOCAL_RANK_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_LOCAL_RANK_H_

#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ffi/backends/nccl/library/primary_contexts.h"
#include "ffi/backends/nccl/library/rank_facts.h"
#include "ffi/backends/nccl/queue/device_runs.h"
#include "ffi/backends/nccl/queue/launch_queue.h"
#include "ffi/backends/nccl/queue/split_phase.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

struct LocalRank {
  LocalRank(const NcclLibrary& library, const RankFacts& facts,
            FlightRecorder& recorder, Health& health)
      : facts(facts),
        queue(library, this->facts, recorder, health),
        split_phase(library),
        runs(DeviceRuns::Of(facts.ordinal)) {}

  const RankFacts facts;
  LaunchQueue queue;
  SplitPhase split_phase;
  DeviceRuns& runs;  // on its device
};

// Makes the ranks of those devices that are in a group.
LocalRanks MakeRanks(const NcclLibrary& library, const CommunicatorSpec& spec,
                     const std::vector<NcclDevice>& devices,
                     const PrimaryContexts& contexts, FlightRecorder& recorder,
                     Health& health);

inline LocalRank* FindByOrdinal(const LocalRanks& ranks, int64_t ordinal) {
  for (const auto& rank : ranks) {
    if (rank->facts.ordinal == ordinal) return rank.get();
  }
  return nullptr;
}

// Returns the error of a call from a device that has no rank here.
inline Status NotOfCommunicator(const Call& call) {
  return FailedPrecondition(call.site->description(), ": device ", call.device_id,
                            " is not in the communicator it was compiled for");
}

// Has the ranks see what their devices have finished.
void Refresh(const LocalRanks& ranks);
// Operations in flight, see LaunchQueue::size(), and those that threads launch.
int64_t CountInFlight(const LocalRanks& ranks);
// Whether a device may be at an operation. What a graph runs is not seen.
bool AreBusy(const LocalRanks& ranks);
// Whether something is in flight, or about to be.
bool HaveWork(const LocalRanks& ranks);
// Whether a graph of XLA's has an operation of the ranks.
bool WereCaptured(const LocalRanks& ranks);
// The devices, by ordinal, that have not come to an operation that others of their
// group are at.
std::set<int64_t> Late(const LocalRanks& ranks);
// Whether a device of the group was given something that is not done.
bool IsGroupGiven(const LocalRanks& ranks, int group);
// Names the first operation that a device is at, of a group or of any, as a message
// begins; "" if none.
std::string FirstOperation(const LocalRanks& ranks, const CommunicatorSpec& spec,
                           std::optional<int> group = std::nullopt);

// Acquires the launch locks of all ranks, without blocking while it holds one: NCCL
// may need one rank to go on before another. Clang follows no set of locks.
using LaunchLocks = std::vector<std::unique_lock<TimedMutex>>;
ErrorOr<LaunchLocks> LockAll(const LocalRanks& ranks, const NcclPatience& patience);

// Returns the figures that come from the ranks alone.
CommunicatorStats StatsOf(const LocalRanks& ranks);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_LOCAL_RANK_H_
