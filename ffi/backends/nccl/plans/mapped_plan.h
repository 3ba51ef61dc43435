// A rank's part of a collective between processes whose memory is mapped: the sender
// stages what others take in memory that they have mapped, and they pull it; or in that
// of the one other that it sends to.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PLANS_MAPPED_PLAN_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PLANS_MAPPED_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/backends/nccl/plans/peer_plan.h"
#include "ffi/backends/nccl/plans/steps.h"

namespace jaxcomm {

struct MappedPlan {
  // What one slot holds. A rank stages, tells its targets, waits for its sources, pulls
  // from them, and tells them that it has.
  struct Chunk {
    std::vector<Step> stages;           // copies of operands to bytes of a slot
    std::vector<Step> pulls;            // from bytes of a slot to results
    std::vector<int> targets, sources;  // each once
  };

  // Whether ranks stage in the slots of those that they send to, one at most.
  bool is_pushed = false;
  std::vector<Step> local;  // copies within the rank, and zeros
  // As many on every rank, so that all number them alike.
  std::vector<Chunk> chunks;
};

// Makes the part of a rank. What several ranks take of an operand is staged once.
MappedPlan MakeMappedPlan(const PeerPlan& plan, int rank, size_t slot_bytes);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PLANS_MAPPED_PLAN_H_
