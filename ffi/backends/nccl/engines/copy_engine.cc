#include "ffi/backends/nccl/engines/copy_engine.h"

namespace jaxcomm {

Status CopyEngine::Enqueue(const Call& call, const Recipe& recipe, LocalRank& rank,
                           cuda::Stream stream) {
  const LaunchQueue::Counted counted(rank.queue.waiting);
  RETURN_IF_ERROR(StartOn(call, recipe, rank, stream, stream));
  return End(call, rank, stream).status();
}

Status CopyEngine::Start(const Call& call, const Recipe& recipe, LocalRank& rank,
                         cuda::Stream stream) {
  const LaunchQueue::Counted counted(rank.queue.waiting);
  return StartOn(call, recipe, rank, stream, /*on=*/nullptr);
}

Status CopyEngine::StartOn(const Call& call, const Recipe& recipe, LocalRank& rank,
                           cuda::Stream ready, cuda::Stream on) {
  InFlight::Named named = rank.queue.Record(call);
  Status status = parts_.health.Refusal();
  if (status.success()) {
    named.sequence = rank.queue.NextNumber();
    CurrentContext current(parts_.library.cuda, rank.facts.context);
    status = copies_->Start(call, recipe.copies, rank.facts.place, ready, on, named);
  }
  if (status.failure()) return rank.queue.Failed(call, named, status);
  rank.queue.counts().Add(*call.site, CallCounts::Kind::kCopied);
  WakeWatchdog();
  return OkStatus();
}

ErrorOr<bool> CopyEngine::Done(const Call& call, LocalRank& rank, cuda::Stream stream) {
  const LaunchQueue::Counted counted(rank.queue.waiting);
  return End(call, rank, stream);
}

ErrorOr<bool> CopyEngine::End(const Call& call, LocalRank& rank, cuda::Stream stream) {
  PeerCopies::LeftToNccl late;
  bool is_begun = false;
  if (Status status = copies_->Done(MarkOf(call), rank.facts.place, stream,
                                    patience_seconds_, &is_begun, &late);
      status.failure()) {
    return parts_.health.FailCall(call, rank.facts, status);
  }
  if (late.is_empty()) return is_begun;
  Call left = call;
  left.operands = late.operands.data();
  left.results = late.results.data();
  RETURN_IF_ERROR(rank.queue.Give(call, stream, late.named, [&] {
    return nccl_.Run(late.steps, left, rank, stream);
  }));
  return is_begun;
}

Status CopyEngine::Forget(const Call& call, LocalRank& rank, cuda::Stream stream) {
  const Status status = copies_->Forget(MarkOf(call), rank.facts.place, stream);
  return status.success() ? status : parts_.health.FailCall(call, rank.facts, status);
}

Status CopyEngine::ForgetEarlierRuns(const Call& call, LocalRank& rank,
                                     cuda::Stream stream) {
  const Status status =
      copies_->ForgetEarlierRuns(call.run_id, rank.facts.place, stream);
  return status.success() ? status : parts_.health.FailCall(call, rank.facts, status);
}

}  // namespace jaxcomm
