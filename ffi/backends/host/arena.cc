#include "ffi/backends/host/arena.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "ffi/cores.h"

namespace jaxcomm {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free,
              "atomics in shared memory must not hide a lock");

// Crossings of one key are looked for in so many places after its own.
constexpr int kProbes = 16;
// Channels that only crossings with all members present may take.
constexpr int kReservedChannels = 4;

constexpr size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

constexpr size_t kPage = 4096;

// Of one crossing: itself, the seats, and for each reader a row of counters.
size_t PassedRow(int processes) {
  return RoundUp(sizeof(std::atomic<uint64_t>) * processes, kLine);
}
size_t CrossingBytes(int processes) {
  return sizeof(Crossing) + processes * (sizeof(Seat) + PassedRow(processes));
}

}  // namespace

uint64_t CrossingKey::Hash() const {
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (uint64_t part : {communicator, group, run, tag}) {
    hash = (hash ^ part) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  return hash;
}

struct Arena::Header {
  uint64_t nonce;  // the segment's
  pthread_mutex_t mutex;
  std::atomic<uint32_t> channels;  // mask of those in use
  std::atomic<uint64_t> opened;
  ProcessState processes[kMaxProcesses];
};

// Held for a few hundred nanoseconds; robust: its holder may be killed.
class Arena::Lock {
 public:
  explicit Lock(pthread_mutex_t* mutex) : mutex_(mutex) {
    int error = EBUSY;
    for (int i = 0; i < 100 && error == EBUSY; ++i) {
      error = pthread_mutex_trylock(mutex_);
      if (error == EBUSY) Pause();
    }
    if (error == EBUSY) error = pthread_mutex_lock(mutex_);
    // The dead process left a crossing half made at worst, which it did not open.
    if (error == EOWNERDEAD) pthread_mutex_consistent(mutex_);
  }
  ~Lock() { pthread_mutex_unlock(mutex_); }

 private:
  pthread_mutex_t* const mutex_;
};

namespace {

// Each step of a collective is a crossing of its own: see MeetingPlace().
uint64_t GroupOf(uint64_t group_and_step) { return group_and_step / 2; }

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

}  // namespace

int64_t Arena::Bytes(int processes) {
  return static_cast<int64_t>(Layout(processes, sizeof(Header)).total);
}

void Arena::Format(const Segment& segment, int processes) {
  // Fresh segments are zero: every crossing is free, every counter 0.
  auto* const header = reinterpret_cast<Header*>(segment.data());
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&header->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  (void)processes;
}

Arena::Arena(std::shared_ptr<Segment> segment, std::vector<int> names, int self)
    : segment_(std::move(segment)),
      names_(std::move(names)),
      processes_(static_cast<int>(names_.size())),
      self_(self),
      crossing_bytes_(CrossingBytes(processes_)),
      passed_row_(PassedRow(processes_)) {
  const Layout layout(processes_, sizeof(Header));
  crossings_ = segment_->data() + layout.crossings;
  inlines_ = segment_->data() + layout.inlines;
  slots_ = segment_->data() + layout.slots;
}

Arena::~Arena() {
  process(self_).presence.store(ProcessState::kLeft, std::memory_order_release);
  uint64_t everyone = 0;
  for (int i = 0; i < processes_; ++i) everyone |= uint64_t{1} << i;
  Ring(everyone);
}

Arena::Header& Arena::header() const {
  return *reinterpret_cast<Header*>(segment_->data());
}

Crossing* Arena::crossing(int index) const {
  return reinterpret_cast<Crossing*>(crossings_ + index * crossing_bytes_);
}

Seat& Arena::seat(const Crossing* crossing, int process) const {
  char* const seats = reinterpret_cast<char*>(const_cast<Crossing*>(crossing) + 1);
  return reinterpret_cast<Seat*>(seats)[process];
}

std::atomic<uint64_t>& Arena::passed(const Crossing* crossing, int reader,
                                     int writer) const {
  char* const rows = reinterpret_cast<char*>(&seat(crossing, processes_));
  return reinterpret_cast<std::atomic<uint64_t>*>(rows + reader * passed_row_)[writer];
}

char* Arena::inline_data(const Crossing* crossing, int process) const {
  const auto index =
      (reinterpret_cast<const char*>(crossing) - crossings_) / crossing_bytes_;
  return inlines_ + (index * processes_ + process) * kInlineBytes;
}

char* Arena::slot(int channel, int process, uint64_t chunk) const {
  const int64_t ring = static_cast<int64_t>(channel) * processes_ + process;
  return slots_ + (ring * kSlots + static_cast<int64_t>(chunk % kSlots)) * kSlotBytes;
}

ProcessState& Arena::process(int index) const { return header().processes[index]; }

Crossing* Arena::Join(const CrossingKey& key, uint64_t members, uint64_t signature,
                      std::string_view call, bool wants_channel) {
  const int home = static_cast<int>(key.Hash() % kCrossings);
  const auto relaxed = std::memory_order_relaxed;
  ProcessState& me = process(self_);
  me.last.Store(call);
  me.started.fetch_add(1, relaxed);
  Lock lock(&header().mutex);
  Crossing* found = nullptr;
  Crossing* free = nullptr;
  Crossing* stale = nullptr;
  for (int probe = 0; probe < kProbes; ++probe) {
    Crossing* const candidate = crossing((home + probe) % kCrossings);
    if (candidate->state.load(relaxed) == Crossing::kFree) {
      if (free == nullptr) free = candidate;
      continue;
    }
    if (candidate->communicator.load(relaxed) == key.communicator &&
        candidate->group.load(relaxed) == key.group &&
        candidate->run.load(relaxed) == key.run &&
        candidate->tag.load(relaxed) == key.tag &&
        seat(candidate, self_).state.load(relaxed) == Seat::kAbsent) {
      // A process that waits for nobody may be several executions ahead: the oldest.
      if (found == nullptr ||
          candidate->opened.load(relaxed) < found->opened.load(relaxed)) {
        found = candidate;
      }
      continue;
    }
    // Failed, and nobody is in it any more: kept for those who come late.
    if (candidate->error.load(relaxed) != 0 &&
        candidate->here.load(relaxed) == candidate->left.load(relaxed) &&
        (stale == nullptr ||
         candidate->opened.load(relaxed) < stale->opened.load(relaxed))) {
      stale = candidate;
    }
  }
  if (found == nullptr) {
    if (free == nullptr) free = stale;
    if (free == nullptr) return nullptr;
    found = free;
    if (found == stale) ReturnChannelLocked(found);
    found->communicator.store(key.communicator, relaxed);
    found->group.store(key.group, relaxed);
    found->run.store(key.run, relaxed);
    found->tag.store(key.tag, relaxed);
    found->members.store(members, relaxed);
    found->signature.store(signature, relaxed);
    found->channel.store(-1, relaxed);
    found->here.store(0, relaxed);
    found->left.store(0, relaxed);
    found->error.store(0, relaxed);
    found->opened.store(header().opened.fetch_add(1, relaxed), relaxed);
    found->call.Store(call);
    for (int i = 0; i < processes_; ++i) {
      seat(found, i).state.store(Seat::kAbsent, relaxed);
      seat(found, i).written.store(0, relaxed);
      for (int j = 0; j < processes_; ++j) passed(found, i, j).store(0, relaxed);
    }
    found->state.store(Crossing::kOpen, std::memory_order_release);
  } else if (found->error.load(relaxed) == 0 &&
             found->signature.load(relaxed) != signature) {
    const std::string text =
        StrCat("a rank of process ", names_[self_], " called ", call,
               " where the ranks before it called ", found->call.Load(),
               "; every rank must run the same collectives in the same order");
    FailLocked(found, ErrorCode::kInvalidArgument, text);
    TellThoseWhoLeftLocked(found, text);
  }
  if (me.unheard_of.load(relaxed) == key.communicator &&
      me.unheard_of_group.load(relaxed) == GroupOf(key.group) &&
      found->error.load(relaxed) == 0) {
    FailLocked(found, ErrorCode::kInvalidArgument, me.unheard.Load());
  }
  seat(found, self_).state.store(Seat::kHere, relaxed);
  found->here.fetch_add(1, std::memory_order_acq_rel);
  if (wants_channel && found->error.load(relaxed) == 0) AssignChannelLocked(found);
  return found;
}

void Arena::FailLocked(Crossing* crossing, ErrorCode code, std::string_view text) {
  crossing->failure.Store(text);
  crossing->error.store(static_cast<uint32_t>(code), std::memory_order_release);
}

void Arena::TellThoseWhoLeftLocked(const Crossing* crossing, const std::string& text) {
  const auto relaxed = std::memory_order_relaxed;
  const uint64_t communicator = crossing->communicator.load(relaxed);
  const uint64_t group = GroupOf(crossing->group.load(relaxed));
  for (uint64_t mask = crossing->members.load(relaxed); mask != 0; mask &= mask - 1) {
    const int member = __builtin_ctzll(mask);
    if (seat(crossing, member).state.load(relaxed) != Seat::kLeft) continue;
    const std::string told = StrCat("an operation that had ended in process ",
                                    names_[member], " failed in others: ", text);
    process(member).unheard.Store(told);
    process(member).unheard_of_group.store(group, relaxed);
    process(member).unheard_of.store(communicator, relaxed);
    Crossing* next = nullptr;
    for (int i = 0; i < kCrossings; ++i) {
      Crossing* const open = this->crossing(i);
      const uint32_t state = seat(open, member).state.load(relaxed);
      if (open->state.load(relaxed) == Crossing::kFree ||
          open->communicator.load(relaxed) != communicator ||
          GroupOf(open->group.load(relaxed)) != group ||
          (state != Seat::kHere && state != Seat::kReady) ||
          open->error.load(relaxed) != 0) {
        continue;
      }
      if (next == nullptr || open->opened.load(relaxed) < next->opened.load(relaxed)) {
        next = open;
      }
    }
    if (next == nullptr) continue;
    FailLocked(next, ErrorCode::kInvalidArgument, told);
    const uint64_t members = next->members.load(relaxed);
    Ring(members);
    // It may itself wait there, on a thread that sleeps.
    if (members >> self_ & 1) RingSelf();
  }
}

void Arena::Heard(const Crossing* crossing) {
  const auto relaxed = std::memory_order_relaxed;
  ProcessState& me = process(self_);
  if (me.unheard_of.load(relaxed) == 0) return;
  Lock lock(&header().mutex);
  if (me.unheard_of.load(relaxed) == crossing->communicator.load(relaxed) &&
      me.unheard_of_group.load(relaxed) == GroupOf(crossing->group.load(relaxed))) {
    me.unheard_of.store(0, relaxed);
  }
}

void Arena::ReturnChannelLocked(Crossing* crossing) {
  const int channel = crossing->channel.exchange(-1, std::memory_order_relaxed);
  if (channel < 0) return;
  header().channels.fetch_and(~(1u << channel), std::memory_order_relaxed);
}

void Arena::AssignChannelLocked(Crossing* crossing) {
  const auto relaxed = std::memory_order_relaxed;
  if (crossing->channel.load(relaxed) >= 0) return;
  const bool all_here = crossing->here.load(relaxed) ==
                        __builtin_popcountll(crossing->members.load(relaxed));
  const uint32_t used = header().channels.load(relaxed);
  const int limit = all_here ? kChannels : kChannels - kReservedChannels;
  // The lowest free one: its pages are there already.
  for (int channel = 0; channel < limit; ++channel) {
    if (used & (1u << channel)) continue;
    header().channels.store(used | (1u << channel), relaxed);
    crossing->channel.store(channel, std::memory_order_release);
    return;
  }
}

void Arena::TryAssignChannel(Crossing* crossing) {
  if (crossing->channel.load(std::memory_order_acquire) >= 0) return;
  Lock lock(&header().mutex);
  AssignChannelLocked(crossing);
}

void Arena::CleanUp(Crossing* crossing) {
  const auto relaxed = std::memory_order_relaxed;
  Lock lock(&header().mutex);
  // By the time the lock is ours the crossing may be clean, or another one: what
  // follows is true of it then as well.
  const uint32_t left = crossing->left.load(std::memory_order_acquire);
  const auto members =
      static_cast<uint32_t>(__builtin_popcountll(crossing->members.load(relaxed)));
  if (left != crossing->here.load(relaxed)) return;
  if (left != members && crossing->error.load(relaxed) == 0) return;
  // Who comes late to a failed crossing touches no channel.
  ReturnChannelLocked(crossing);
  if (left == members) crossing->state.store(Crossing::kFree, relaxed);
}

void Arena::LeaveSeat(Crossing* crossing, int process) {
  const auto members = static_cast<uint32_t>(
      __builtin_popcountll(crossing->members.load(std::memory_order_relaxed)));
  seat(crossing, process).state.store(Seat::kLeft, std::memory_order_release);
  const uint32_t left = crossing->left.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (left == members || crossing->error.load(std::memory_order_acquire) != 0) {
    CleanUp(crossing);
  }
}

void Arena::Leave(Crossing* crossing) {
  LeaveSeat(crossing, self_);
  process(self_).finished.fetch_add(1, std::memory_order_relaxed);
}

void Arena::Abandon(Crossing* crossing, int process) {
  // Several survivors may try; one of them does it.
  std::atomic<uint32_t>& state = seat(crossing, process).state;
  uint32_t seen = state.load(std::memory_order_acquire);
  while (seen == Seat::kHere || seen == Seat::kReady) {
    if (state.compare_exchange_weak(seen, Seat::kLeft)) {
      LeaveSeat(crossing, process);
      return;
    }
  }
}

void Arena::Fail(Crossing* crossing, const Status& error) {
  {
    Lock lock(&header().mutex);
    if (crossing->error.load(std::memory_order_relaxed) != 0) return;
    FailLocked(crossing, *error.errc(), error.message());
  }
  Ring(crossing->members.load(std::memory_order_relaxed));
}

std::vector<std::string> Arena::CallsOf(int process) const {
  Lock lock(&header().mutex);
  std::vector<std::string> calls;
  for (int i = 0; i < kCrossings; ++i) {
    const Crossing* const open = crossing(i);
    if (open->state.load(std::memory_order_relaxed) == Crossing::kFree) continue;
    const uint32_t state = seat(open, process).state.load(std::memory_order_relaxed);
    if (state == Seat::kHere || state == Seat::kReady) {
      calls.push_back(open->call.Load());
    }
  }
  return calls;
}

void Arena::Ring(uint64_t mask) const {
  // What was published must be visible before we look who sleeps; the sleeper does it
  // the other way round.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (mask &= ~(uint64_t{1} << self_); mask != 0; mask &= mask - 1) {
    ProcessState& other = process(__builtin_ctzll(mask));
    if (other.asleep.load(std::memory_order_relaxed) != 1) continue;
    other.doorbell.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &other.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void Arena::RingSelf() const {
  ProcessState& me = process(self_);
  me.doorbell.fetch_add(1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (me.asleep.load(std::memory_order_relaxed) == 0) return;
  syscall(SYS_futex, &me.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Arena::Sleep(uint32_t seen, double seconds) const {
  timespec timeout;
  timeout.tv_sec = static_cast<time_t>(seconds);
  timeout.tv_nsec =
      static_cast<long>((seconds - static_cast<double>(timeout.tv_sec)) * 1e9);
  syscall(SYS_futex, &process(self_).doorbell, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace jaxcomm
