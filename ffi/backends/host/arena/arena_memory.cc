#include "ffi/backends/host/arena/arena_memory.h"

#include <time.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>

#include "ffi/core/hash.h"
#include "ffi/os/cores.h"

namespace jaxcomm {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free,
              "atomics in shared memory must not hide a lock");

constexpr size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

constexpr size_t kPage = 4096;

// Count this up when a field comes to mean something else, or when processes divide
// their work in another way: sizes and offsets do not show that.
constexpr int kMeaning = 3;

// Looks at the lock, which is held for a few hundred nanoseconds, before sleeping on
// it.
constexpr int kLockSpins = 100;
// A process that holds the lock for so long is stopped, or has crashed in a way that
// the system does not report.
constexpr int kLockSeconds = 60;

// The failure where shared memory holds a number that no process of ours writes.
Status Overwritten(const std::string& what) {
  return Status(
      ErrorCode::kInternal,
      StrCat("the shared memory of the processes of this host was overwritten (", what,
             "). A process has written through a wrong pointer: end all "
             "of them, and start the program anew"));
}

// Of one crossing: itself, the seats, and for each reader a row of counters.
size_t PassedRow(int processes) {
  return RoundUp(sizeof(std::atomic<uint64_t>) * processes, kLine);
}
size_t CrossingBytes(int processes) {
  return sizeof(Crossing) + processes * (sizeof(Seat) + PassedRow(processes));
}

// Offsets of the parts of a segment, each on a page of its own.
struct Layout {
  explicit Layout(int processes, size_t header) {
    crossings = RoundUp(header, kPage);
    inlines = RoundUp(crossings + kCrossings * CrossingBytes(processes), kPage);
    slots = inlines + static_cast<size_t>(kCrossings) * processes * kInlineBytes;
    total = slots + static_cast<size_t>(kChannels) * processes * kSlots * kSlotBytes;
  }
  size_t crossings, inlines, slots, total;
};

// glibc 2.30 and newer can wait by the steady clock, which ThreadSanitizer does not
// see.
#if defined(__GLIBC_PREREQ) && !defined(__SANITIZE_THREAD__)
#if __GLIBC_PREREQ(2, 30)
#define JAXCOMM_HAS_CLOCKLOCK
#endif
#endif

int LockForASecond(pthread_mutex_t* mutex) {
#ifdef JAXCOMM_HAS_CLOCKLOCK
  constexpr clockid_t kClock = CLOCK_MONOTONIC;
  const auto lock_until = [mutex](const timespec& end) {
    return pthread_mutex_clocklock(mutex, kClock, &end);
  };
#else
  constexpr clockid_t kClock = CLOCK_REALTIME;
  const auto lock_until = [mutex](const timespec& end) {
    return pthread_mutex_timedlock(mutex, &end);
  };
#endif
  timespec end;
  clock_gettime(kClock, &end);
  ++end.tv_sec;
  return lock_until(end);
}

}  // namespace

ArenaMemory::Lock::Lock(const ArenaMemory& memory) : mutex_(&memory.header().mutex) {
  // glibc's trylock keeps a mutex that it reports as not recoverable: never ask again.
  if (memory.lock_error_.load(std::memory_order_relaxed) != 0) return;
  int error = EBUSY;
  for (int i = 0; i < kLockSpins && error == EBUSY; ++i) {
    error = pthread_mutex_trylock(mutex_);
    if (error == EBUSY) Pause();
  }
  // Second by second, so that a pause of all processes counts as one second at most.
  for (int i = 0; i < kLockSeconds && (error == EBUSY || error == ETIMEDOUT); ++i) {
    error = LockForASecond(mutex_);
  }
  if (error == EOWNERDEAD) {
    // First the repair: if this process is killed too, the next one repairs again.
    memory.RepairLocked();
    error = pthread_mutex_consistent(mutex_);
    if (error != 0) pthread_mutex_unlock(mutex_);
  }
  if (error != 0) memory.lock_error_.store(error, std::memory_order_relaxed);
  is_held_ = error == 0;
}

void ArenaMemory::RepairLocked() const {
  const auto relaxed = std::memory_order_relaxed;
  uint32_t used = 0;
  for (int i = 0; i < kCrossings; ++i) {
    Crossing* const open = crossing(i);
    if (open->state.load(relaxed) == Crossing::kFree) continue;
    const uint64_t here = open->here.load(relaxed), left = open->left.load(relaxed);
    // Opened by the dead process, which had yet to take its seat; or left by all.
    const bool is_unused = here == 0 || left == open->members.load(relaxed);
    if (is_unused || (here == left && open->error.load(relaxed) != 0)) {
      open->channel.store(-1, relaxed);
    }
    if (is_unused) open->state.store(Crossing::kFree, relaxed);
    const int channel = open->channel.load(relaxed);
    if (IsChannel(channel)) used |= 1u << channel;
  }
  header().channels.store(used, relaxed);
}

Status ArenaMemory::Failure() const {
  const int error = lock_error_.load(std::memory_order_relaxed);
  if (error == 0) {
    return FailedPrecondition(
        "refused, since a collective has failed in process ",
        header().first.process.load(std::memory_order_relaxed) - 1,
        ", and processes may be out of step. Call jaxcomm.finalize(), then "
        "jaxcomm.init(), in every process; or jaxcomm.shrink() if one was lost. The "
        "first failure: ",
        header().first.text.Load());
  }
  const std::string reason =
      error == ETIMEDOUT || error == EBUSY
          ? StrCat("a process has held it for ", kLockSeconds, " s")
          : std::strerror(error);
  return Status(ErrorCode::kInternal,
                StrCat("the lock of the shared memory has failed (", reason,
                       "). Call jaxcomm.finalize() in every process of this host"));
}

uint64_t ArenaMemory::MembersOf(const Crossing* crossing) const {
  const uint64_t all = ~uint64_t{0} >> (kMaxProcesses - processes_);
  return crossing->members.load(std::memory_order_relaxed) & all;
}

ErrorOr<int> ArenaMemory::ChannelOf(const Crossing* crossing) const {
  const int32_t channel = crossing->channel.load(std::memory_order_acquire);
  if (channel == -1 || IsChannel(channel)) return channel;
  return Overwritten(StrCat("a channel is ", channel, ", of ", kChannels));
}

Status ArenaMemory::FailureOf(const Crossing* crossing) const {
  const uint32_t code = crossing->error.load(std::memory_order_acquire);
  if (code == 0) return OkStatus();
  if (code > static_cast<uint32_t>(ErrorCode::kUnauthenticated)) {
    return Overwritten(StrCat("an error code is ", code));
  }
  return Status(static_cast<ErrorCode>(code), crossing->failure.Load());
}

int64_t ArenaMemory::Bytes(int processes) {
  return static_cast<int64_t>(Layout(processes, sizeof(Header)).total);
}

uint64_t ArenaMemory::LayoutHash() {
  std::string text = StrCat("meaning ", kMeaning);
  const auto add = [&text](std::initializer_list<size_t> numbers) {
    for (const size_t number : numbers) text += StrCat(",", number);
  };
  add({sizeof(Header), offsetof(Header, nonce), offsetof(Header, mutex),
       sizeof(pthread_mutex_t), offsetof(Header, channels), offsetof(Header, opened),
       offsetof(Header, starved), offsetof(Header, first),
       offsetof(FirstFailure, process), offsetof(FirstFailure, text),
       offsetof(Header, processes)});
  add({sizeof(ProcessState), offsetof(ProcessState, presence),
       offsetof(ProcessState, doorbell), offsetof(ProcessState, stands_still),
       offsetof(ProcessState, last), offsetof(ProcessState, last_number)});
  add({sizeof(Crossing), offsetof(Crossing, state), offsetof(Crossing, communicator),
       offsetof(Crossing, group), offsetof(Crossing, run), offsetof(Crossing, tag),
       offsetof(Crossing, members), offsetof(Crossing, signature),
       offsetof(Crossing, channel), offsetof(Crossing, here), offsetof(Crossing, left),
       offsetof(Crossing, error), offsetof(Crossing, opened), offsetof(Crossing, call),
       offsetof(Crossing, failure)});
  add({sizeof(Seat), offsetof(Seat, state), offsetof(Seat, written),
       offsetof(Seat, lacks)});
  add({kMaxProcesses, kCrossings, kChannels, kSlots, kSlotBytes, kInlineBytes, kLine});
  // The parts of a segment, for the fewest and the most processes.
  for (const int processes : {1, kMaxProcesses}) {
    const Layout layout(processes, sizeof(Header));
    add({PassedRow(processes), CrossingBytes(processes), layout.crossings,
         layout.inlines, layout.slots, layout.total});
  }
  return Fnv1a(text);
}

void ArenaMemory::Format(const Segment& segment) {
  // Fresh segments are zero: every crossing is free, every counter 0.
  auto* const header = reinterpret_cast<Header*>(segment.data());
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&header->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

ArenaMemory::ArenaMemory(std::shared_ptr<Segment> segment, int processes)
    : segment_(std::move(segment)),
      processes_(processes),
      crossing_bytes_(CrossingBytes(processes)),
      passed_row_(PassedRow(processes)) {
  const Layout layout(processes, sizeof(Header));
  crossings_ = segment_->data() + layout.crossings;
  inlines_ = segment_->data() + layout.inlines;
  slots_ = segment_->data() + layout.slots;
}

Crossing* ArenaMemory::crossing(int index) const {
  return reinterpret_cast<Crossing*>(crossings_ + index * crossing_bytes_);
}

Seat& ArenaMemory::seat(const Crossing* crossing, int process) const {
  char* const seats = reinterpret_cast<char*>(const_cast<Crossing*>(crossing) + 1);
  return reinterpret_cast<Seat*>(seats)[process];
}

std::atomic<uint64_t>& ArenaMemory::passed(const Crossing* crossing, int reader,
                                           int writer) const {
  char* const rows = reinterpret_cast<char*>(&seat(crossing, processes_));
  return reinterpret_cast<std::atomic<uint64_t>*>(rows + reader * passed_row_)[writer];
}

char* ArenaMemory::inline_data(const Crossing* crossing, int process) const {
  const auto index =
      (reinterpret_cast<const char*>(crossing) - crossings_) / crossing_bytes_;
  return inlines_ + (index * processes_ + process) * kInlineBytes;
}

char* ArenaMemory::slot(int channel, int process, uint64_t chunk) const {
  const int64_t ring = static_cast<int64_t>(channel) * processes_ + process;
  return slots_ + (ring * kSlots + static_cast<int64_t>(chunk % kSlots)) * kSlotBytes;
}

}  // namespace jaxcomm
