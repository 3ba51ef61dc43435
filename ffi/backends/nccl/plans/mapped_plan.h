// A rank's part of a collective between processes whose memory is mapped: the sender
// stages what others take in memory that they have mapped, and they pull it.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PLANS_MAPPED_PLAN_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PLANS_MAPPED_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/backends/nccl/plans/peer_plan.h"
#include "ffi/backends/nccl/plans/steps.h"

namespace jaxcomm {

struct MappedPlan {
  // From an operand into a slot of the rank's own memory.
  struct Stage {
    int leaf = 0;
    int64_t from = 0;  // bytes into the operand
    size_t at = 0;     // bytes into the slot
    size_t bytes = 0;
  };
  // From a slot of another rank's memory into a result.
  struct Pull {
    int source = 0;
    size_t at = 0;
    int leaf = 0;
    int64_t to = 0;
    size_t bytes = 0;
  };
  // What one slot holds. A rank stages, tells its targets, waits for its sources, pulls
  // from them, and tells them that it has.
  struct Chunk {
    std::vector<Stage> stages;
    std::vector<Pull> pulls;
    std::vector<int> targets, sources;  // each once
  };

  std::vector<Step> local;  // copies within the rank, and zeros
  // As many on every rank, so that all number them alike.
  std::vector<Chunk> chunks;
};

// Makes the part of a rank. What several ranks take of an operand is staged once.
MappedPlan MakeMappedPlan(const PeerPlan& plan, int rank, size_t slot_bytes);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PLANS_MAPPED_PLAN_H_
