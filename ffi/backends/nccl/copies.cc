#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"
#include "ffi/backends/nccl/run_steps.h"

namespace jaxcomm {

std::shared_ptr<const PeerPlan> NcclCommunicator::CopiesFor(const Call& call,
                                                            Rank& rank) {
  if (copies_ == nullptr || call.may_be_captured ||
      !MayBeCopied(*call.site, rank.size)) {
    return nullptr;
  }
  auto plan = FindPeerPlan(*call.site, number_, rank.size);
  if (plan->parts.empty()) return nullptr;
  // NCCL has kernels of its own for symmetric memory, but none that sends along pairs.
  if (call.site->kind() == Plan::Kind::kPermute) return plan;
  std::lock_guard<std::timed_mutex> lock(rank.launching);
  return IsSymmetric(call, rank) ? nullptr : plan;
}

Status NcclCommunicator::FailedCopies(const Call& call, const Rank& rank,
                                      const Status& status) {
  const std::string text = StrCat("rank ", rank.rank, " of ", rank.size, " (device ",
                                  rank.device, "): ", status.message());
  if (!failed() && status.errc() == ErrorCode::kFailedPrecondition) {
    return Refused(call, text);
  }
  return Ended(call, rank, ErrorCode::kInternal, text);
}

Status NcclCommunicator::Copy(const Call& call, std::shared_ptr<const PeerPlan> plan,
                              Rank& rank, cuda::Stream stream) {
  const Counted counted(num_copying_);
  bool is_begun = false;
  Status status = StartCopies(call, std::move(plan), rank, stream, stream);
  return status.failure() ? status : DoneCopies(call, rank, stream, &is_begun);
}

Status NcclCommunicator::StartCopies(const Call& call,
                                     std::shared_ptr<const PeerPlan> plan, Rank& rank,
                                     cuda::Stream ready, cuda::Stream on) {
  if (failed()) return FailureOf(call, rank);
  if (DevicesAreStopped()) return DevicesStoppedError();
  if (is_suspended_) return Suspended(call);
  CurrentContext current(library_.cuda, rank.context);
  const InFlight::Named named = {recorder().Start(call.site->operation(), call.run_id,
                                                  call.tag, rank.group, rank.rank),
                                 call.site->operation(), ++rank.operations};
  Status status = copies_->Start(call, std::move(plan), rank.place, ready, on, named);
  if (status.failure()) {
    recorder().Finish(named.ticket, FlightRecorder::State::kFailed);
    return FailedCopies(call, rank, status);
  }
  rank.counts.Add(*call.site, CallCounts::Kind::kCopied);
  WakeWatchdog();
  return OkStatus();
}

Status NcclCommunicator::DoneCopies(const Call& call, Rank& rank, cuda::Stream stream,
                                    bool* is_begun) {
  if (copies_ == nullptr) return OkStatus();
  PeerCopies::Rest rest;
  if (Status status = copies_->Done(MarkOf(call), rank.place, stream,
                                    spec().timeout_seconds, is_begun, &rest);
      status.failure()) {
    return FailedCopies(call, rank, status);
  }
  return rest.is_empty() ? OkStatus() : LaunchRest(rest, call, rank, stream);
}

}  // namespace jaxcomm
