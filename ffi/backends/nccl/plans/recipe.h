// A call site as a rank carries it out: made at its first call, and kept.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PLANS_RECIPE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PLANS_RECIPE_H_

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "ffi/backends/nccl/library/library.h"
#include "ffi/backends/nccl/library/rank_facts.h"
#include "ffi/backends/nccl/plans/engine_choice.h"
#include "ffi/backends/nccl/plans/mapped_plan.h"
#include "ffi/backends/nccl/plans/one_shot_plan.h"
#include "ffi/backends/nccl/plans/peer_plan.h"
#include "ffi/backends/nccl/plans/steps.h"
#include "ffi/base/status.h"
#include "ffi/core/call_site.h"
#include "ffi/core/derived_cache.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

struct Recipe {
  Steps steps;          // of the rank
  OneShotPlan kernels;  // the same for ours; empty where they cannot
  CallFacts facts;      // but for those of one call
  // The copies of all ranks; null if there are too few bytes for them, or nobody asked.
  std::shared_ptr<const PeerPlan> copies;
  // The rank's part of them between processes; null where nobody asked.
  std::shared_ptr<const MappedPlan> mapped;
};

// Who may do what only moves bytes, instead of NCCL.
struct CopyKinds {
  bool of_process = false;  // see PeerCopies
  // Of MappedCopies, and how many there are; 0: not they.
  size_t slot_bytes = 0, slots = 0;
};

// The recipes of the ranks of one communicator in this process. Thread-safe.
class Recipes {
 public:
  // `ranks`: how many there are.
  Recipes(const NcclLibrary& library, size_t ranks)
      : library_(library), of_ranks_(ranks) {}

  // Finds the recipe of a rank at a call site. Fails if NCCL cannot do the call.
  ErrorOr<const Recipe*> Find(const CallSite& site, const RankFacts& rank,
                              const CopyKinds& copies);

 private:
  // Ranks call at the same time: each has a lock of its own.
  struct alignas(64) OfRank {
    Mutex mutex;
    DerivedCache<Recipe> recipes GUARDED_BY(mutex);
  };

  ErrorOr<Recipe> Make(const CallSite& site, const RankFacts& rank,
                       const CopyKinds& copies);
  // The copies of all ranks of a group.
  std::shared_ptr<const PeerPlan> CopiesOf(const CallSite& site, const Plan& plan);

  const NcclLibrary& library_;
  std::deque<OfRank> of_ranks_;  // by place
  Mutex mutex_;
  // By the size of the group.
  std::map<int, DerivedCache<std::shared_ptr<const PeerPlan>>> copies_
      GUARDED_BY(mutex_);
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PLANS_RECIPE_H_
