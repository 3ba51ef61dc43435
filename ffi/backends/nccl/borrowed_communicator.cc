#include "ffi/backends/nccl/borrowed_communicator.h"

#include <utility>

namespace jaxcomm {

BorrowedCommunicator::BorrowedCommunicator(CommunicatorSpec spec,
                                           const NcclLibrary& library,
                                           const std::vector<NcclDevice>& devices,
                                           Borrowed wanted, OnFailure on_failure)
    : Communicator(std::move(spec)),
      library_(library),
      wanted_(std::move(wanted)),
      contexts_(library, devices),
      health_(this->spec(), library, {/*world=*/nullptr, /*shares=*/false, on_failure},
              ranks_),
      ranks_(MakeRanks(library, this->spec(), devices, contexts_, recorder(), health_)),
      comms_(library, health_, ranks_, {}),
      engines_(library, this->spec(), health_, ranks_, comms_, {},
               /*is_borrowed=*/true) {}

BorrowedCommunicator::~BorrowedCommunicator() {
  comms_.Release();
  for (const auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->facts.context);
    rank->queue.Release();
  }
}

Status BorrowedCommunicator::Prepare() {
  RETURN_IF_ERROR(contexts_.status());
  for (const auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->facts.context);
    RETURN_IF_ERROR(rank->queue.Prepare());
  }
  RETURN_IF_ERROR(comms_.Prepare());
  health_.SetOwner(shared_from_this());
  return OkStatus();
}

Status BorrowedCommunicator::Enqueue(const Call& call, void* stream) {
  LocalRank* const rank = FindByOrdinal(ranks_, call.device_id);
  return rank == nullptr ? NotOfCommunicator(call)
                         : engines_.Enqueue(call, *rank, stream, /*may_wait=*/true);
}

CommunicatorStats BorrowedCommunicator::stats() const {
  CommunicatorStats stats = StatsOf(ranks_);
  stats.host_bytes = recorder().host_bytes();
  return stats;
}

}  // namespace jaxcomm
