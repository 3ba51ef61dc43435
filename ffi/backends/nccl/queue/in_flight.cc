#include "ffi/backends/nccl/queue/in_flight.h"

#include "ffi/flight/operation_table.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {
namespace {

Status TooManyStreams() {
  return Status(ErrorCode::kInternal,
                StrCat("operations of more than ", InFlight::most_streams(),
                       " streams are in flight"));
}

}  // namespace

Status InFlight::Prepare() {
  MutexLock lock(mutex_);
  entries_.resize(kSlots);
  tickets_.resize(static_cast<size_t>(recorder_.entries_per_rank()));
  for (Entry& entry : entries_) {
    for (cuda::Event* event : {&entry.began, &entry.ended}) {
      RETURN_IF_ERROR(
          library_.Try(library_.cuda.EventCreate, event, cuda::kEventDisableTiming));
    }
  }
  return OkStatus();
}

void InFlight::Release() {
  MutexLock lock(mutex_);
  for (Entry& entry : entries_) {
    for (cuda::Event event : {entry.began, entry.ended}) {
      if (event != nullptr) library_.cuda.EventDestroy(event);
    }
  }
  entries_.clear();
}

Status InFlight::Begin(cuda::Stream stream, bool may_be_captured,
                       Clock::time_point now) {
  cuda::CaptureStatus capture = cuda::kCaptureNone;
  if (may_be_captured) library_.cuda.StreamIsCapturing(stream, &capture);
  is_captured_ = capture != cuda::kCaptureNone;
  if (is_captured_) {
    was_captured_ = true;
    return OkStatus();
  }
  MutexLock lock(mutex_);
  if (size() >= kEntries) Retire();
  const int index = Find(stream);
  if (index < 0) return TooManyStreams();
  is_begun_ = index == size();
  if (!is_begun_) return OkStatus();
  // A concurrent Poll() only pops the front, so the entry stays valid after unlocking.
  Entry& entry = At(index);
  entry.told = {};
  entry.is_running = false;
  entry.is_right_behind =
      size() > 0 && now - last_given_ < kRightBehind && last_stream_ == stream;
  entry.stream = stream;
  const bool is_right_behind = entry.is_right_behind;
  lock.Unlock();
  if (is_right_behind) return OkStatus();
  return library_.Try(library_.cuda.EventRecord, entry.began, stream);
}

Status InFlight::End(cuda::Stream stream, const Named& named, Clock::time_point now) {
  if (is_captured_) {
    // It runs whenever the graph does, which we do not see.
    recorder_.Finish(named.ticket, FlightRecorder::State::kCompleted);
    return OkStatus();
  }
  MutexLock lock(mutex_);
  last_given_ = now;
  last_stream_ = stream;
  const int index = Find(stream);
  if (index < 0) return TooManyStreams();
  const bool is_own = index == size();
  // Else the entry stands for this one too, from now on.
  Entry& entry = At(index);
  entry.told = {};
  entry.stream = stream;
  if (is_own) {
    entry.operation = named.operation;
    entry.sequence = named.sequence;
    if (!is_begun_) {
      entry.is_running = true;
      entry.since = now;
    }
  } else {
    extended_ = &entry;
  }
  lock.Unlock();
  const Status recorded = library_.Try(library_.cuda.EventRecord, entry.ended, stream);
  lock.Lock();
  extended_ = nullptr;
  if (!is_own && size() == 0) {  // Fail() came meanwhile
    recorder_.Finish(named.ticket, FlightRecorder::State::kFailed);
    return recorded;
  }
  if (is_own) size_.fetch_add(1, std::memory_order_relaxed);
  AddTicket(named.ticket);
  return recorded;
}

Status InFlight::Add(cuda::Stream stream, const Named& named, const Told& told) {
  MutexLock lock(mutex_);
  if (size() >= kEntries) Retire();
  const int index = Find(stream);
  if (index < 0) return TooManyStreams();
  last_stream_ = stream;
  Entry& entry = At(index);
  entry.stream = stream;
  entry.told = told;
  if (index == size()) {
    entry.operation = named.operation;
    entry.sequence = named.sequence;
    entry.is_running = entry.is_right_behind = false;
    size_.fetch_add(1, std::memory_order_relaxed);
  }
  AddTicket(named.ticket);
  return OkStatus();
}

int InFlight::Find(cuda::Stream stream) const {
  for (int index = kEntries - 1; index < size(); ++index) {
    if (At(index).stream == stream) return index;
  }
  return size() < kSlots ? size() : -1;
}

void InFlight::AddTicket(FlightRecorder::Ticket ticket) {
  tickets_[tickets_given_ % tickets_.size()] = ticket;
  At(size() - 1).tickets = ++tickets_given_;
  if (tickets_given_ - tickets_finished_ > tickets_.size()) ++tickets_finished_;
}

void InFlight::Finish(Entry& entry, FlightRecorder::State state) {
  for (; tickets_finished_ < entry.tickets; ++tickets_finished_) {
    recorder_.Finish(tickets_[tickets_finished_ % tickets_.size()], state);
  }
}

bool InFlight::IsDone(int index) const {
  const Entry& entry = At(index);
  if (&entry == extended_) return false;
  if (entry.told.progress != nullptr) {
    return jaxcomm::IsDone(*entry.told.progress, entry.told.last);
  }
  return library_.cuda.EventQuery(entry.ended) == cuda::kSuccess;
}

bool InFlight::HasBegun(const Entry& entry) const {
  if (entry.told.progress != nullptr) {
    return jaxcomm::HasBegun(*entry.told.progress, entry.told.first);
  }
  return entry.is_right_behind ||
         library_.cuda.EventQuery(entry.began) == cuda::kSuccess;
}

int InFlight::CountDone() const {
  if (!IsDone(0)) return 0;
  // A stream does one thing after the other, and asking costs as much as launching: of
  // those that were given to one stream in a row, the last is asked first.
  const cuda::Stream stream = entries_[first_].stream;
  int end = 1;
  while (end < size() && At(end).stream == stream) ++end;
  if (IsDone(end - 1)) return end;
  int done = 1;
  for (int running = end - 1; done < running;) {
    const int middle = (done + running) / 2;
    if (IsDone(middle)) {
      done = middle + 1;
    } else {
      running = middle;
    }
  }
  return done;
}

void InFlight::Retire() {
  while (size() > 0) {
    const int done = CountDone();
    if (done == 0) return;
    for (int i = 0; i < done; ++i) {
      Finish(entries_[first_], FlightRecorder::State::kCompleted);
      first_ = (first_ + 1) % kSlots;
    }
    size_.fetch_sub(done, std::memory_order_relaxed);
  }
}

InFlight::Overdue InFlight::Poll(Clock::time_point now,
                                 std::chrono::duration<double> patience) {
  MutexLock lock(mutex_);
  Retire();
  Overdue overdue;
  if (size() == 0) return overdue;
  Entry& entry = entries_[first_];
  // Any event says whether the device has failed.
  const cuda::Result result = library_.cuda.EventQuery(entry.ended);
  if (result != cuda::kSuccess && result != cuda::kNotReady) {
    overdue.status = library_.Check(result, "cuEventQuery");
  } else if (!entry.is_running && HasBegun(entry)) {
    entry.is_running = true;
    entry.since = now;
  }
  overdue.found =
      overdue.status.failure() || (entry.is_running && now - entry.since > patience);
  overdue.operation = entry.operation;
  overdue.sequence = entry.sequence;
  return overdue;
}

InFlight::Overdue InFlight::First() {
  MutexLock lock(mutex_);
  Retire();
  if (size() == 0) return {};
  return {true, entries_[first_].operation, entries_[first_].sequence};
}

void InFlight::Refresh() {
  MutexLock lock(mutex_);
  Retire();
}

void InFlight::Fail() {
  MutexLock lock(mutex_);
  for (; size() > 0; size_.fetch_sub(1, std::memory_order_relaxed)) {
    Finish(entries_[first_], FlightRecorder::State::kFailed);
    first_ = (first_ + 1) % kSlots;
  }
}

std::string Describe(const InFlight::Overdue& operation, const CommunicatorSpec& spec,
                     const RankFacts& rank) {
  const Operation& named = OperationTable::Get().At(operation.operation);
  return StrCat(named.name, "(", named.operands, ") over axes ", spec.axes, " (lane '",
                spec.lane, "', operation ", operation.sequence, "), ", rank.ToString(),
                ": ");
}

std::string DescribeLate(const CommunicatorSpec& spec) {
  return StrCat("not done after ", spec.timeout_seconds,
                " s. Other ranks may have stopped or run a different program; see "
                "JAXCOMM_TIMEOUT");
}

}  // namespace jaxcomm
