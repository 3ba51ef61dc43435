#include "ffi/backends/nccl/borrowed_communicator.h"

#include <utility>

namespace jaxcomm {
namespace {

LocalRanks MakeRanks(const NcclLibrary& library, const CommunicatorSpec& spec,
                     const std::vector<BorrowedCommunicator::Device>& devices,
                     FlightRecorder& recorder, Health& health) {
  LocalRanks ranks;
  for (const auto& device : devices) {
    RankFacts facts = FindRank(spec.groups, device.id);
    if (facts.size == 0) continue;
    facts.place = ranks.size();
    facts.ordinal = device.ordinal;
    cuda::Device number = 0;
    library.cuda.DeviceGet(&number, device.ordinal);
    library.cuda.DevicePrimaryCtxRetain(&facts.context, number);
    ranks.push_back(std::make_unique<LocalRank>(library, facts, recorder, health));
    health.Add(*ranks.back());
  }
  return ranks;
}

}  // namespace

BorrowedCommunicator::BorrowedCommunicator(CommunicatorSpec spec,
                                           const NcclLibrary& library,
                                           const std::vector<Device>& devices,
                                           Borrowed wanted, OnFailure on_failure)
    : Communicator(std::move(spec)),
      library_(library),
      wanted_(std::move(wanted)),
      number_(NextCommunicatorNumber()),
      health_(this->spec(), library, {/*world=*/nullptr, /*shares=*/false, on_failure}),
      ranks_(MakeRanks(library, this->spec(), devices, recorder(), health_)),
      comms_(library, health_, ranks_, {}),
      nccl_(library, this->spec(), health_, ranks_, comms_, /*is_borrowed=*/true) {}

BorrowedCommunicator::~BorrowedCommunicator() {
  comms_.Release();
  for (const auto& rank : ranks_) {
    {
      CurrentContext current(library_.cuda, rank->facts.context);
      rank->queue.Release();
    }
    cuda::Device number = 0;
    library_.cuda.DeviceGet(&number, rank->facts.ordinal);
    library_.cuda.DevicePrimaryCtxRelease(number);
  }
}

Status BorrowedCommunicator::Prepare() {
  for (const auto& rank : ranks_) {
    RETURN_IF_ERROR(PrepareDeviceStop(library_, rank->facts.context));
    CurrentContext current(library_.cuda, rank->facts.context);
    RETURN_IF_ERROR(rank->queue.Prepare());
  }
  RETURN_IF_ERROR(comms_.Prepare());
  health_.SetOwner(shared_from_this());
  return OkStatus();
}

xla::ffi::Future BorrowedCommunicator::Execute(const Call& call) {
  return FailedFuture(FailedPrecondition(call.site->description(),
                                         ": XLA lends communicators of GPUs only"));
}

Status BorrowedCommunicator::Enqueue(const Call& call, void* stream) {
  LocalRank* const rank = FindByOrdinal(ranks_, call.device_id);
  if (rank == nullptr) return NotOfCommunicator(call);
  const Recipe* recipe = nullptr;
  if (Status status = FindRecipe(
          library_, *call.site, {number_, rank->facts.size, rank->facts.rank}, &recipe);
      status.failure()) {
    rank->queue.Refuse(call);
    return status;
  }
  return nccl_.Enqueue(call, *recipe, *rank, stream);
}

CommunicatorStats BorrowedCommunicator::stats() const {
  CommunicatorStats stats = StatsOf(ranks_);
  stats.host_bytes = recorder().host_bytes();
  return stats;
}

}  // namespace jaxcomm
