#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"
#include "ffi/backends/nccl/run_steps.h"
#include "ffi/flight_dump.h"

namespace jaxcomm {

Status NcclCommunicator::MakeCopies() {
  size_t ranks = 0;
  for (const auto& group : spec().groups) ranks += group.size();
  if (!how_.copy_engines || ranks != ranks_.size()) return OkStatus();
  std::vector<PeerCopies::Member> members;
  for (const auto& rank : ranks_) {
    members.push_back(
        {rank->group, rank->rank, rank->size, rank->ordinal, rank->context});
  }
  return PeerCopies::Create(library_, recorder(), members, &copies_);
}

std::shared_ptr<const PeerPlan> NcclCommunicator::CopiesFor(const Call& call,
                                                            Rank& rank) {
  if (copies_ == nullptr || !MayBeCopied(*call.site, rank.size)) return nullptr;
  auto plan = FindPeerPlan(*call.site, number_, rank.size);
  if (plan->parts.empty()) return nullptr;
  // NCCL has kernels of its own for symmetric memory.
  std::lock_guard<std::timed_mutex> lock(rank.launching);
  return IsSymmetric(call, rank) ? nullptr : plan;
}

Status NcclCommunicator::StartCopies(const Call& call,
                                     std::shared_ptr<const PeerPlan> plan, Rank& rank,
                                     cuda::Stream ready, cuda::Stream on) {
  if (failed()) return failure();
  if (is_suspended_) return Suspended(call);
  CurrentContext current(library_.cuda, rank.context);
  const PeerCopies::Named named = {
      recorder().Start(*call.site, call.run_id, call.tag, rank.group, rank.rank),
      call.site->operation(), ++rank.operations};
  Status status = copies_->Start(call, std::move(plan), rank.place, ready, on, named);
  if (status.failure()) {
    recorder().Finish(named.ticket, FlightRecorder::State::kFailed);
    return Ended(call, ErrorCode::kInternal, status.message());
  }
  Count(call, rank, &copied_calls_);
  return OkStatus();
}

Status NcclCommunicator::DoneCopies(const Call& call, Rank& rank, cuda::Stream stream,
                                    bool* is_begun) {
  if (copies_ == nullptr) return OkStatus();
  const Status status = copies_->Done(call.results[0], rank.place, stream,
                                      spec().timeout_seconds, is_begun);
  if (status.success()) return status;
  const bool is_late = status.errc() == ErrorCode::kDeadlineExceeded;
  if (!failed() && is_late) DumpFlightRecords("timeout");
  return Ended(call, is_late ? ErrorCode::kDeadlineExceeded : ErrorCode::kInternal,
               StrCat("rank ", rank.rank, " of ", rank.size, " (device ", rank.device,
                      "): ", status.message()));
}

}  // namespace jaxcomm
