#include "ffi/backends/nccl/plans/recipe.h"

#include <algorithm>

#include "ffi/os/mutex.h"

namespace jaxcomm {
namespace {

CallFacts FactsOf(const CallSite& site, const Plan& plan, const Recipe& recipe,
                  size_t slots) {
  CallFacts facts;
  facts.size = plan.size;
  facts.copies_serve = CopiesServe(plan.kind);
  facts.moves_along_pairs = plan.kind == Plan::Kind::kPermute;
  for (const Plan::Division& leaf : plan.leaves) {
    if (leaf.room >= 0) facts.is_packed_for_nccl = true;
  }
  facts.bytes_sent = site.operand_bytes() * (plan.size - 1);
  if (recipe.copies != nullptr) {
    facts.bytes_sent = recipe.copies->bytes_sent;
    facts.copies = recipe.copies->copies;
  }
  facts.gathers_in_slots = plan.kind == Plan::Kind::kAllGather &&
                           recipe.mapped != nullptr &&
                           recipe.mapped->chunks.size() <= slots;
  facts.works = recipe.kernels.arrays();
  facts.is_staged = recipe.kernels.is_staged();
  facts.bytes_exchanged = recipe.kernels.exchanged_bytes(plan.size);
  facts.exchanges_rows = recipe.kernels.has_gaps();
  return facts;
}

Natives NativesOf(const nccl::Api& api) {
  const bool has_newer =
      api.AlltoAll != nullptr && api.Gather != nullptr && api.Scatter != nullptr;
  return has_newer ? Natives::kOf228 : Natives::kOf218;
}

}  // namespace

ErrorOr<const Recipe*> Recipes::Find(const CallSite& site, const RankFacts& rank,
                                     const CopyKinds& copies) {
  OfRank& own = of_ranks_[rank.place];
  MutexLock lock(own.mutex);
  return own.recipes.Find(site, [&] { return Make(site, rank, copies); });
}

ErrorOr<Recipe> Recipes::Make(const CallSite& site, const RankFacts& rank,
                              const CopyKinds& copies) {
  ASSIGN_OR_RETURN(const Plan plan, site.MakePlan(rank.size, /*operands_of=*/nullptr));
  Recipe made;
  ASSIGN_OR_RETURN(made.steps,
                   MakeSteps(site, plan, rank.rank, NativesOf(library_.nccl)));
  made.kernels = MakeOneShotPlan(site, plan, made.steps);
  // Most calls are too small for copies, and their copies are never counted.
  const bool may_copy = copies.of_process || copies.slot_bytes > 0;
  if (may_copy && site.operand_bytes() * (rank.size - 1) >= kLeastBytesOfMore) {
    made.copies = CopiesOf(site, plan);
    if (copies.slot_bytes > 0 && !made.copies->parts.empty()) {
      made.mapped = std::make_shared<const MappedPlan>(
          MakeMappedPlan(*made.copies, rank.rank, copies.slot_bytes));
    }
  }
  made.facts = FactsOf(site, plan, made, copies.slots);
  return made;
}

std::shared_ptr<const PeerPlan> Recipes::CopiesOf(const CallSite& site,
                                                  const Plan& plan) {
  using Copies = std::shared_ptr<const PeerPlan>;
  MutexLock lock(mutex_);
  return **copies_[plan.size].Find(site, [&]() -> ErrorOr<Copies> {
    return std::make_shared<const PeerPlan>(MakePeerPlan(site, plan));
  });
}

}  // namespace jaxcomm
