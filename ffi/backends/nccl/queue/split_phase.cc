#include "ffi/backends/nccl/queue/split_phase.h"

#include "ffi/backends/nccl/engines/peer_copies.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

Status SplitPhase::Prepare() {
  return library_.Try(library_.cuda.StreamCreateWithPriority, &stream_,
                      cuda::kStreamNonBlocking, -1);
}

void SplitPhase::Release() {
  MutexLock lock(mutex_);
  for (const Begun& begun : begun_) spare_.push_back(begun.event);
  for (cuda::Event event : spare_) library_.cuda.EventDestroy(event);
  if (stream_ != nullptr) library_.cuda.StreamDestroy(stream_);
}

ErrorOr<cuda::Event> SplitPhase::TakeEvent(const void* mark) {
  MutexLock lock(mutex_);
  // The program of an earlier start into these results failed before its end.
  for (size_t i = begun_.size(); mark != nullptr && i-- > 0;) {
    if (begun_[i].mark != mark) continue;
    spare_.push_back(begun_[i].event);
    begun_.erase(begun_.begin() + static_cast<ptrdiff_t>(i));
  }
  cuda::Event event = nullptr;
  if (spare_.empty()) {
    RETURN_IF_ERROR(
        library_.Try(library_.cuda.EventCreate, &event, cuda::kEventDisableTiming));
  } else {
    event = spare_.back();
    spare_.pop_back();
  }
  return event;
}

Status SplitPhase::Start(const Call& call, cuda::Stream stream,
                         const std::function<Status()>& give) {
  const void* const mark = MarkOf(call);
  ASSIGN_OR_RETURN(const cuda::Event event, TakeEvent(mark));
  const auto record = [&](cuda::Stream on) {
    return library_.Try(library_.cuda.EventRecord, event, on);
  };
  // The operands are there once `stream` has come so far, and the results once the
  // rank's own stream has come to the end of the operation.
  Status status = record(stream);
  if (status.success()) {
    status = library_.Try(library_.cuda.StreamWaitEvent, stream_, event, 0);
  }
  if (status.success()) status = give();
  if (status.success()) {
    status = record(stream_);
  } else if (record(stream_).success()) {
    // Some of it may be on its way, and XLA gives its memory away.
    (void)library_.cuda.StreamWaitEvent(stream, event, 0);
  }
  MutexLock lock(mutex_);
  if (status.success()) {
    begun_.push_back({mark, call.run_id, event});
  } else {
    spare_.push_back(event);
  }
  return status;
}

bool SplitPhase::all_have_ended() {
  MutexLock lock(mutex_);
  return begun_.empty();
}

Status SplitPhase::WaitForEarlierRuns(const Call& call, cuda::Stream stream) {
  MutexLock lock(mutex_);
  for (Begun& begun : begun_) {
    if (begun.run == call.run_id || begun.is_waited_for) continue;
    RETURN_IF_ERROR(
        library_.Try(library_.cuda.StreamWaitEvent, stream, begun.event, 0));
    begun.is_waited_for = true;
  }
  return OkStatus();
}

ErrorOr<bool> SplitPhase::Done(const Call& call, cuda::Stream stream) {
  const void* const mark = MarkOf(call);
  cuda::Event event = nullptr;
  {
    MutexLock lock(mutex_);
    for (size_t i = begun_.size(); i-- > 0 && event == nullptr;) {
      if (begun_[i].mark != mark) continue;
      event = begun_[i].event;
      begun_.erase(begun_.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  if (event == nullptr) return false;
  const Status status = library_.Try(library_.cuda.StreamWaitEvent, stream, event, 0);
  MutexLock lock(mutex_);
  spare_.push_back(event);
  if (status.failure()) return status;
  return true;
}

}  // namespace jaxcomm
