#include "ffi/backends/nccl/engines/engines.h"

#include <utility>
#include <vector>

namespace jaxcomm {

Engines::Engines(NcclParts& parts, EnginePolicy policy)
    : parts_(parts),
      policy_(policy),
      recipes_(parts.library, parts.ranks.size()),
      nccl_(parts) {
  parts_.health.Add(nccl_);
}

Status Engines::Make(FlightRecorder& recorder) {
  std::vector<RankFacts> facts;
  std::vector<cuda::Stream> streams;
  for (const auto& rank : parts_.ranks) {
    facts.push_back(rank->facts);
    streams.push_back(rank->split_phase.stream());
  }
  const auto memory = [&] {
    return std::make_unique<PeerMemory>(parts_.library, facts, streams,
                                        policy_.arena_bytes);
  };
  ASSIGN_OR_RETURN(data_dependent_,
                   DataDependent::Create(parts_, nccl_, policy_, memory()));
  const bool is_of_process = parts_.spec.num_ranks() == parts_.ranks.size();
  if (policy_.copy_engines && !is_of_process) {
    ASSIGN_OR_RETURN(mapped_, MappedCopies::Create(parts_, memory()));
    parts_.health.Add(*mapped_);
  }
  if (policy_.copy_engines && is_of_process) {
    ASSIGN_OR_RETURN(std::unique_ptr<PeerCopies> copies,
                     PeerCopies::Create(parts_.library, recorder, facts));
    if (copies != nullptr) {
      for (const auto& rank : parts_.ranks) {
        rank->queue.Follow(copies->in_flight(rank->facts.place));
      }
      copy_ = std::make_unique<CopyEngine>(parts_, std::move(copies),
                                           policy_.copy_patience_seconds, nccl_);
      parts_.health.Add(*copy_);
    }
  }
  if (policy_.one_shot) {
    ASSIGN_OR_RETURN(std::unique_ptr<OneShot> kernels, OneShot::Create(memory()));
    one_shot_ = std::make_unique<OneShotEngine>(parts_, std::move(kernels));
    parts_.health.Add(*one_shot_);
  }
  return OkStatus();
}

Status Engines::Connect() {
  RETURN_IF_ERROR(data_dependent_->Connect());
  if (mapped_ != nullptr) RETURN_IF_ERROR(mapped_->Share());
  return one_shot_ == nullptr ? OkStatus() : one_shot_->kernels().Share(parts_);
}

void Engines::Leave() {
  if (data_dependent_ != nullptr) data_dependent_->Leave();
  if (mapped_ != nullptr) mapped_->Leave();
  if (one_shot_ != nullptr) one_shot_->kernels().Leave();
}

EngineKind Engines::ChooseFor(const CallFacts& facts, size_t place) const {
  EngineTopology topology;
  topology.can_copy = CanCopy(place);
  topology.can_map = CanMap(place);
  if (one_shot_ != nullptr) {
    topology.has_kernels = one_shot_->kernels().takes_part(place);
    topology.works_left = one_shot_->kernels().works_left(place);
  }
  return Choose(facts, policy_, topology);
}

ErrorOr<Engines::Chosen> Engines::Find(const Call& call, LocalRank& rank,
                                       bool is_start) {
  const bool can_copy = CanCopy(rank.facts.place);
  const bool can_map = CanMap(rank.facts.place);
  const auto recipe = recipes_.Find(
      *call.site, rank.facts,
      {can_copy, can_map ? MappedCopies::kSlotBytes : 0, MappedCopies::kSlots});
  if (recipe.has_error()) {
    rank.queue.Refuse(call);
    return recipe.error();
  }
  CallFacts facts = (*recipe)->facts;
  facts.may_be_captured = call.may_be_captured;
  facts.is_start = is_start;
  facts.is_symmetric = (can_copy || can_map) && nccl_.IsSymmetric(call, rank);
  Engine* const engines[] = {&nccl_, copy_.get(), mapped_.get(), one_shot_.get()};
  return Chosen{*recipe, engines[static_cast<int>(ChooseFor(facts, rank.facts.place))]};
}

Status Engines::Enqueue(const Call& call, LocalRank& rank, cuda::Stream stream) {
  if (call.site->plan_reads_operands()) {
    return data_dependent_->Enqueue(call, rank, stream);
  }
  ASSIGN_OR_RETURN(const Chosen chosen, Find(call, rank, /*is_start=*/false));
  return chosen.engine->Enqueue(call, *chosen.recipe, rank, stream);
}

Status Engines::Start(const Call& call, LocalRank& rank, cuda::Stream stream) {
  ASSIGN_OR_RETURN(const Chosen chosen, Find(call, rank, /*is_start=*/true));
  CurrentContext current(parts_.library.cuda, rank.facts.context);
  if (copy_ != nullptr && chosen.engine != copy_.get()) {
    RETURN_IF_ERROR(copy_->Forget(call, rank, stream));
  }
  return chosen.engine->Start(call, *chosen.recipe, rank, stream);
}

Status Engines::Done(const Call& call, LocalRank& rank, cuda::Stream stream) {
  if (copy_ != nullptr) {
    ASSIGN_OR_RETURN(const bool is_begun, copy_->Done(call, rank, stream));
    if (is_begun) return OkStatus();
  }
  CurrentContext current(parts_.library.cuda, rank.facts.context);
  // The other engines start calls on the rank's own stream, whichever they are.
  ASSIGN_OR_RETURN(const bool is_begun, nccl_.Done(call, rank, stream));
  if (is_begun) return OkStatus();
  return FailedPrecondition(
      call.site->description(),
      ": no collective was begun that gives its result here; XLA may have copied the "
      "buffer in between. Use the function without _start and _done");
}

std::string Engines::one_shot_text() const {
  if (one_shot_ == nullptr) return "no: not asked for";
  const std::string& reason = one_shot_->kernels().reason();
  return reason.empty() ? "yes" : StrCat("no: ", reason);
}

std::string Engines::copies_text() const {
  if (!policy_.copy_engines) return "no: not asked for";
  std::string reason = mapped_ == nullptr ? "" : mapped_->reason();
  for (const auto& rank : parts_.ranks) {
    const bool is_served = rank->facts.size < 2 || CanCopy(rank->facts.place);
    if (mapped_ == nullptr && !is_served) {
      reason = "a device cannot reach the memory of another";
    }
  }
  return reason.empty() ? "yes" : StrCat("no: ", reason);
}

int64_t Engines::device_bytes() const {
  return data_dependent_->device_bytes() +
         (mapped_ == nullptr ? 0 : mapped_->device_bytes()) +
         (one_shot_ == nullptr ? 0 : one_shot_->kernels().device_bytes());
}

}  // namespace jaxcomm
