#include "ffi/backends/nccl/nccl_communicator.h"

#include <mutex>
#include <utility>

namespace jaxcomm {

Status NcclCommunicator::EnqueueStart(const Call& call, void* stream) {
  Rank* const rank = ByOrdinal(call.device_id);
  if (rank == nullptr) return NotMine(call);
  if (rank->call_cards != nullptr) {
    if (Status status = CompareCalls(call, *rank); status.failure()) return status;
  }
  if (auto plan = CopiesFor(call, *rank)) {
    const Counted counted(num_copying_);
    return StartCopies(call, std::move(plan), *rank, stream, /*on=*/nullptr);
  }
  CurrentContext current(library_.cuda, rank->context);
  const void* const mark = MarkOf(call);
  if (copies_ != nullptr) {
    if (Status status = copies_->Forget(mark, rank->place, stream); status.failure()) {
      return FailedCopies(call, *rank, status);
    }
  }
  cuda::Event event = nullptr;
  {
    std::lock_guard<std::mutex> lock(rank->halves_mutex);
    // What was begun here before has no end any more: its program failed in between.
    for (size_t i = 0; mark != nullptr && i < rank->begun.size(); ++i) {
      if (rank->begun[i].first != mark) continue;
      rank->spare_events.push_back(rank->begun[i].second);
      rank->begun.erase(rank->begun.begin() + static_cast<ptrdiff_t>(i--));
    }
    if (!rank->spare_events.empty()) {
      event = rank->spare_events.back();
      rank->spare_events.pop_back();
    }
  }
  Status status = OkStatus();
  if (event == nullptr) {
    status = library_.Check(
        library_.cuda.EventCreate(&event, cuda::kEventDisableTiming), "cuEventCreate");
  }
  // The operands are there once `stream` has come so far, and the results once the
  // rank's own stream has come to the end of the operation.
  if (status.success()) {
    status = library_.Check(library_.cuda.EventRecord(event, stream), "cuEventRecord");
  }
  if (status.success()) {
    status = library_.Check(library_.cuda.StreamWaitEvent(rank->stream, event, 0),
                            "cuStreamWaitEvent");
  }
  if (status.success()) status = Launch(call, *rank, rank->stream);
  if (status.success()) {
    status =
        library_.Check(library_.cuda.EventRecord(event, rank->stream), "cuEventRecord");
  }
  std::lock_guard<std::mutex> lock(rank->halves_mutex);
  if (status.success()) {
    rank->begun.emplace_back(mark, event);
  } else if (event != nullptr) {
    rank->spare_events.push_back(event);
  }
  return status;
}

Status NcclCommunicator::EnqueueDone(const Call& call, void* stream) {
  Rank* const rank = ByOrdinal(call.device_id);
  if (rank == nullptr) return NotMine(call);
  {
    const Counted counted(num_copying_);
    bool is_copied = false;
    Status status = DoneCopies(call, *rank, stream, &is_copied);
    if (is_copied) return status;
  }
  const void* const mark = MarkOf(call);
  cuda::Event event = nullptr;
  {
    std::lock_guard<std::mutex> lock(rank->halves_mutex);
    for (size_t i = rank->begun.size(); i-- > 0 && event == nullptr;) {
      if (rank->begun[i].first != mark) continue;
      event = rank->begun[i].second;
      rank->begun.erase(rank->begun.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  if (event == nullptr) {
    return FailedPrecondition(
        call.site->description(),
        ": no collective was begun that gives its result here; XLA may have copied the "
        "buffer in between. Use the function without _start and _done");
  }
  CurrentContext current(library_.cuda, rank->context);
  Status status = library_.Check(library_.cuda.StreamWaitEvent(stream, event, 0),
                                 "cuStreamWaitEvent");
  std::lock_guard<std::mutex> lock(rank->halves_mutex);
  rank->spare_events.push_back(event);
  return status;
}

}  // namespace jaxcomm
