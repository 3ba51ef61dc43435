#include "ffi/backends/nccl/engines/one_shot_engine.h"

namespace jaxcomm {
namespace {

// Where the infos of all ranks arrive, in a rank's scratch memory.
constexpr size_t kArriveAt = 1024;
static_assert(kArriveAt + OneShotArguments::kMostRanks * sizeof(OneShot::PeerInfo) <=
              Comms::kScratchBytes);

}  // namespace

Status OneShotEngine::Enqueue(const Call& call, const Recipe& recipe, LocalRank& rank,
                              cuda::Stream stream) {
  InFlight::Told told;
  const auto launch = [&]() -> Status {
    ASSIGN_OR_RETURN(told, sums_->Launch(recipe.steps, call, rank.facts.place, stream));
    return OkStatus();
  };
  // What poisons results comes behind the sum, which says nothing of it.
  RETURN_IF_ERROR(rank.queue.Give(call, stream, rank.queue.Record(call), launch,
                                  parts_.health.has_poison() ? nullptr : &told));
  rank.queue.counts().Add(*call.site, CallCounts::Kind::kOneShot);
  return OkStatus();
}

Status OneShotEngine::ShareInboxes() {
  std::vector<LocalRank*> ranks;
  for (const auto& rank : parts_.ranks) {
    if (sums_->NeedsPeerInfo(rank->facts.place)) ranks.push_back(rank.get());
  }
  if (ranks.empty()) return OkStatus();
  RETURN_IF_ERROR(ExchangeInfo(ranks));
  for (const LocalRank* rank : ranks) sums_->Open(rank->facts.place);
  RETURN_IF_ERROR(ExchangeInfo(ranks));
  for (const LocalRank* rank : ranks) sums_->Agree(rank->facts.place);
  return OkStatus();
}

Status OneShotEngine::ExchangeInfo(const std::vector<LocalRank*>& ranks) {
  constexpr size_t kBytes = sizeof(OneShot::PeerInfo);
  const NcclLibrary& library = parts_.library;
  Comms& comms = parts_.comms;
  for (const LocalRank* rank : ranks) {
    const size_t place = rank->facts.place;
    CurrentContext current(library.cuda, rank->facts.context);
    RETURN_IF_ERROR(library.Try(library.cuda.MemcpyHtoDAsync, comms.scratch(place),
                                sums_->own_info(place), kBytes,
                                rank->split_phase.stream()));
  }
  RETURN_IF_ERROR(comms.InGroup("first use", [&](LocalRank& rank, nccl::Comm comm) {
    const size_t place = rank.facts.place;
    if (!sums_->NeedsPeerInfo(place)) return nccl::kSuccess;
    return library.nccl.AllGather(
        reinterpret_cast<void*>(comms.scratch(place)),
        reinterpret_cast<void*>(comms.scratch(place) + kArriveAt), kBytes,
        nccl::Type::kInt8, comm, rank.split_phase.stream());
  }));
  for (const LocalRank* rank : ranks) {
    const size_t place = rank->facts.place;
    CurrentContext current(library.cuda, rank->facts.context);
    RETURN_IF_ERROR(library.Try(
        library.cuda.MemcpyDtoHAsync, sums_->received_infos(place),
        comms.scratch(place) + kArriveAt,
        static_cast<size_t>(rank->facts.size) * kBytes, rank->split_phase.stream()));
  }
  return comms.WaitForStreams();
}

}  // namespace jaxcomm
