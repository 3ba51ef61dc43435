#include "ffi/backends/nccl/engines/engines.h"

#include <utility>
#include <vector>

namespace jaxcomm {

Engines::Engines(const NcclLibrary& library, const CommunicatorSpec& spec,
                 Health& health, const LocalRanks& ranks, Comms& comms,
                 EnginePolicy policy, bool is_borrowed)
    : library_(library),
      spec_(spec),
      health_(health),
      ranks_(ranks),
      comms_(comms),
      policy_(policy),
      nccl_(library, spec, health, ranks, comms, is_borrowed) {
  // Whether XLA's communicators fail is XLA's to see.
  if (!is_borrowed) health_.Add(nccl_);
}

Status Engines::Make(FlightRecorder& recorder) {
  std::vector<RankFacts> facts;
  std::vector<cuda::Stream> streams;
  for (const auto& rank : ranks_) {
    facts.push_back(rank->facts);
    streams.push_back(rank->split_phase.stream());
  }
  if (policy_.copy_engines && spec_.num_ranks() == ranks_.size()) {
    std::unique_ptr<PeerCopies> copies;
    RETURN_IF_ERROR(PeerCopies::Create(library_, recorder, facts, &copies));
    if (copies != nullptr) {
      for (const auto& rank : ranks_) {
        rank->queue.Follow(copies->in_flight(rank->facts.place));
      }
      copy_ = std::make_unique<CopyEngine>(library_, spec_, health_, std::move(copies),
                                           nccl_);
      health_.Add(*copy_);
    }
  }
  if (policy_.one_shot) {
    std::unique_ptr<OneShot> sums;
    RETURN_IF_ERROR(OneShot::Create(library_, facts, streams, &sums));
    one_shot_ = std::make_unique<OneShotEngine>(library_, std::move(sums));
    health_.Add(*one_shot_);
  }
  return OkStatus();
}

Status Engines::Connect() {
  return one_shot_ == nullptr ? OkStatus() : one_shot_->ShareInboxes(comms_, ranks_);
}

void Engines::Leave() {
  if (one_shot_ != nullptr) one_shot_->sums().Leave();
}

EngineChoice Engines::ChooseFor(const CallFacts& facts, size_t place) const {
  EngineTopology topology;
  topology.can_copy = copy_ != nullptr;
  if (one_shot_ != nullptr) {
    topology.can_add = one_shot_->sums().takes_part(place);
    topology.sums_left = one_shot_->sums().sums_left(place);
  }
  return Choose(facts, policy_, topology);
}

Status Engines::FindRecipe(CallSite& site, const RankFacts& rank,
                           const Recipe** recipe) const {
  return jaxcomm::FindRecipe(
      library_, site, {communicator_, rank.size, rank.rank, copy_ != nullptr}, recipe);
}

Status Engines::Find(const Call& call, LocalRank& rank, bool may_wait, Chosen* chosen) {
  if (Status status = FindRecipe(*call.site, rank.facts, &chosen->recipe);
      status.failure()) {
    rank.queue.Refuse(call);
    return status;
  }
  CallFacts facts = chosen->recipe->facts;
  facts.may_be_captured = call.may_be_captured;
  facts.may_wait = may_wait;
  facts.is_symmetric = copy_ != nullptr && nccl_.IsSymmetric(call, rank);
  Engine* const engines[] = {&nccl_, copy_.get(), one_shot_.get()};
  chosen->engine = engines[static_cast<int>(ChooseFor(facts, rank.facts.place).kind)];
  return OkStatus();
}

Status Engines::Enqueue(const Call& call, LocalRank& rank, cuda::Stream stream,
                        bool may_wait) {
  Chosen chosen;
  RETURN_IF_ERROR(Find(call, rank, may_wait, &chosen));
  return chosen.engine->Enqueue(call, *chosen.recipe, rank, stream);
}

Status Engines::Start(const Call& call, LocalRank& rank, cuda::Stream stream) {
  Chosen chosen;
  RETURN_IF_ERROR(Find(call, rank, /*may_wait=*/true, &chosen));
  CurrentContext current(library_.cuda, rank.facts.context);
  if (copy_ != nullptr && chosen.engine != copy_.get()) {
    RETURN_IF_ERROR(copy_->Forget(call, rank, stream));
  }
  return chosen.engine->Start(call, *chosen.recipe, rank, stream);
}

Status Engines::Done(const Call& call, LocalRank& rank, cuda::Stream stream) {
  bool is_begun = false;
  if (copy_ != nullptr) {
    Status status = copy_->Done(call, rank, stream, &is_begun);
    if (is_begun) return status;
  }
  CurrentContext current(library_.cuda, rank.facts.context);
  // The other engines start calls on the rank's own stream, whichever they are.
  Status status = nccl_.Done(call, rank, stream, &is_begun);
  if (is_begun) return status;
  return FailedPrecondition(
      call.site->description(),
      ": no collective was begun that gives its result here; XLA may have copied the "
      "buffer in between. Use the function without _start and _done");
}

Status Engines::Explain(CallSite& site, const RankFacts& rank,
                        EngineChoice* choice) const {
  const Recipe* recipe = nullptr;
  RETURN_IF_ERROR(FindRecipe(site, rank, &recipe));
  *choice = ChooseFor(recipe->facts, rank.place);
  return OkStatus();
}

std::string Engines::one_shot_text() const {
  if (one_shot_ == nullptr) return "no: not asked for";
  const std::string& reason = one_shot_->sums().reason();
  return reason.empty() ? "yes" : StrCat("no: ", reason);
}

int64_t Engines::device_bytes() const {
  return one_shot_ == nullptr ? 0 : one_shot_->device_bytes();
}

}  // namespace jaxcomm
