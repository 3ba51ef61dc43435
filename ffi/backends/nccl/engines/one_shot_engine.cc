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
  RETURN_IF_ERROR(rank.queue.Give(call, stream, rank.queue.Record(call), [&] {
    return sums_->Launch(recipe.steps, call, rank.facts.place, stream);
  }));
  rank.queue.counts().Add(*call.site, CallCounts::Kind::kOneShot);
  return OkStatus();
}

Status OneShotEngine::ShareInboxes(Comms& comms, const LocalRanks& ranks) {
  bool is_needed = false;
  for (const auto& rank : ranks) {
    is_needed = is_needed || sums_->NeedsPeerInfo(rank->facts.place);
  }
  if (!is_needed) return OkStatus();
  RETURN_IF_ERROR(ExchangeInfo(comms, ranks));
  for (const auto& rank : ranks) {
    if (sums_->NeedsPeerInfo(rank->facts.place)) sums_->Open(rank->facts.place);
  }
  RETURN_IF_ERROR(ExchangeInfo(comms, ranks));
  for (const auto& rank : ranks) {
    if (sums_->NeedsPeerInfo(rank->facts.place)) sums_->Agree(rank->facts.place);
  }
  return OkStatus();
}

Status OneShotEngine::ExchangeInfo(Comms& comms, const LocalRanks& ranks) {
  constexpr size_t kBytes = sizeof(OneShot::PeerInfo);
  for (const auto& rank : ranks) {
    const size_t place = rank->facts.place;
    if (!sums_->NeedsPeerInfo(place)) continue;
    CurrentContext current(library_.cuda, rank->facts.context);
    RETURN_IF_ERROR(library_.Try(library_.cuda.MemcpyHtoDAsync, comms.scratch(place),
                                 sums_->own_info(place), kBytes,
                                 rank->split_phase.stream()));
  }
  RETURN_IF_ERROR(comms.InGroup(
      "first use", comms.patience(), [&](LocalRank& rank, nccl::Comm comm) {
        const size_t place = rank.facts.place;
        if (!sums_->NeedsPeerInfo(place)) return nccl::kSuccess;
        return library_.nccl.AllGather(
            reinterpret_cast<void*>(comms.scratch(place)),
            reinterpret_cast<void*>(comms.scratch(place) + kArriveAt), kBytes,
            nccl::Type::kInt8, comm, rank.split_phase.stream());
      }));
  for (const auto& rank : ranks) {
    const size_t place = rank->facts.place;
    if (!sums_->NeedsPeerInfo(place)) continue;
    CurrentContext current(library_.cuda, rank->facts.context);
    RETURN_IF_ERROR(library_.Try(
        library_.cuda.MemcpyDtoHAsync, sums_->received_infos(place),
        comms.scratch(place) + kArriveAt,
        static_cast<size_t>(rank->facts.size) * kBytes, rank->split_phase.stream()));
  }
  return comms.WaitForStreams();
}

}  // namespace jaxcomm
