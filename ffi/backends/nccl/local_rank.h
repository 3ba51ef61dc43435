// A rank of this process, as every engine needs it.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_LOCAL_RANK_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_LOCAL_RANK_H_

#include <memory>
#include <vector>

#include "ffi/backends/nccl/launch_queue.h"
#include "ffi/backends/nccl/rank_facts.h"
#include "ffi/backends/nccl/split_phase.h"

namespace jaxcomm {

struct LocalRank {
  LocalRank(const NcclLibrary& library, const RankFacts& facts,
            FlightRecorder& recorder, Health& health)
      : facts(facts),
        queue(library, this->facts, recorder, health),
        split_phase(library) {}

  const RankFacts facts;
  LaunchQueue queue;
  SplitPhase split_phase;
};

using LocalRanks = std::vector<std::unique_ptr<LocalRank>>;

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

// Returns the figures that come from the ranks alone.
CommunicatorStats StatsOf(const LocalRanks& ranks);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_LOCAL_RANK_H_
