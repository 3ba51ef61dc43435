#include "ffi/backends/nccl/borrowed_communicator.h"

#include <utility>

namespace jaxcomm {

BorrowedCommunicator::BorrowedCommunicator(CommunicatorSpec spec,
                                           const NcclLibrary& library,
                                           const std::vector<NcclDevice>& devices,
                                           Borrowed wanted, OnFailure on_failure)
    : Communicator(std::move(spec)),
      wanted_(std::move(wanted)),
      contexts_(library, devices),
      parts_(this->spec(), library, {/*world=*/nullptr, /*shares=*/false, on_failure},
             devices, contexts_, recorder(), {}),
      engines_(parts_, {}, /*is_borrowed=*/true) {}

BorrowedCommunicator::~BorrowedCommunicator() {
  parts_.comms.Release();
  for (const auto& rank : parts_.ranks) {
    CurrentContext current(parts_.library.cuda, rank->facts.context);
    rank->queue.Release();
  }
}

Status BorrowedCommunicator::Prepare() {
  RETURN_IF_ERROR(contexts_.status());
  for (const auto& rank : parts_.ranks) {
    CurrentContext current(parts_.library.cuda, rank->facts.context);
    RETURN_IF_ERROR(rank->queue.Prepare());
  }
  RETURN_IF_ERROR(parts_.comms.Prepare());
  parts_.health.SetOwner(shared_from_this());
  return OkStatus();
}

Status BorrowedCommunicator::Enqueue(const Call& call, void* stream) {
  LocalRank* const rank = FindByOrdinal(parts_.ranks, call.device_id);
  return rank == nullptr ? NotOfCommunicator(call)
                         : engines_.Enqueue(call, *rank, stream, /*may_wait=*/true);
}

CommunicatorStats BorrowedCommunicator::stats() const {
  CommunicatorStats stats = StatsOf(parts_.ranks);
  stats.host_bytes = recorder().host_bytes();
  return stats;
}

}  // namespace jaxcomm
