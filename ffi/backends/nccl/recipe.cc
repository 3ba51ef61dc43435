#include "ffi/backends/nccl/recipe.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "ffi/backends/nccl/one_shot_sum.h"

namespace jaxcomm {
namespace {

void AddSums(const Steps& steps, CallFacts* facts) {
  if (!steps.local.empty()) return;
  for (const Step& step : steps.grouped) {
    const std::optional<OneShotSum> sum = SumOf(step, facts->size);
    if (!sum.has_value()) {
      facts->sums = 0;
      return;
    }
    ++facts->sums;
    facts->words_of_largest_sum = std::max(facts->words_of_largest_sum, sum->words);
  }
}

CallFacts FactsOf(const CallSite& site, const Plan& plan, const Recipe& recipe) {
  CallFacts facts;
  facts.size = plan.size;
  facts.only_moves = OnlyMoves(plan.kind);
  facts.moves_along_pairs = plan.kind == Plan::Kind::kPermute;
  facts.bytes_sent = site.operand_bytes() * (plan.size - 1);
  if (recipe.copies != nullptr) {
    facts.bytes_sent = recipe.copies->bytes_sent;
    facts.copies = recipe.copies->copies;
  }
  AddSums(recipe.steps, &facts);
  return facts;
}

Natives NativesOf(const nccl::Api& api) {
  const bool has_newer =
      api.AlltoAll != nullptr && api.Gather != nullptr && api.Scatter != nullptr;
  return has_newer ? Natives::kOf228 : Natives::kOf218;
}

}  // namespace

uint64_t NextCommunicatorNumber() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

Status FindRecipe(const NcclLibrary& library, CallSite& site, const RecipeOf& of,
                  const Recipe** recipe) {
  // Most calls are too small for copies, and their copies are never counted.
  std::shared_ptr<const PeerPlan> copies;
  if (of.with_copies && site.operand_bytes() * (of.size - 1) >= kLeastCopiedBytes) {
    copies = FindPeerPlan(site, of.communicator, of.size);
  }
  Status status = OkStatus();
  const uint64_t key = of.communicator << 40 | static_cast<uint64_t>(of.rank) << 20 |
                       static_cast<uint64_t>(of.size);
  const auto make = [&]() -> std::shared_ptr<const Recipe> {
    Plan plan;
    auto made = std::make_shared<Recipe>();
    status = site.MakePlan(of.size, nullptr, &plan);
    if (status.success()) {
      status = MakeSteps(site, plan, of.rank, NativesOf(library.nccl), &made->steps);
    }
    if (status.failure()) return nullptr;
    made->copies = std::move(copies);
    made->facts = FactsOf(site, plan, *made);
    return made;
  };
  *recipe = site.Derived<Recipe>(key, make).get();
  return status;
}

std::shared_ptr<const PeerPlan> FindPeerPlan(CallSite& site, uint64_t communicator,
                                             int size) {
  const uint64_t key = communicator << 40 | static_cast<uint64_t>(size);
  const auto make = [&]() -> std::shared_ptr<const PeerPlan> {
    Plan plan;
    if (site.MakePlan(size, nullptr, &plan).failure()) {
      return std::make_shared<PeerPlan>();
    }
    return std::make_shared<PeerPlan>(MakePeerPlan(site, plan));
  };
  return site.Derived<PeerPlan>(key, make);
}

}  // namespace jaxcomm
