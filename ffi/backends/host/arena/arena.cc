#include "ffi/backends/host/arena/arena.h"

#include <utility>

#include "ffi/core/hash.h"
#include "ffi/os/forked.h"

namespace jaxcomm {
namespace {

// How many places of the table a key may be in.
constexpr int kProbes = 16;
// Channels that only crossings with all members present may take.
constexpr int kReservedChannels = 4;

}  // namespace

uint64_t CrossingKey::Hash() const {
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (uint64_t part : {communicator, group, run, tag}) hash = Mix(hash, part);
  return hash;
}

Arena::Arena(std::shared_ptr<Segment> segment, std::vector<int> names, int self)
    : ArenaMemory(std::move(segment), static_cast<int>(names.size())),
      names_(std::move(names)),
      self_(self) {}

Arena::~Arena() {
  if (IsForked()) return;
  process(self()).presence.store(ProcessState::kLeft, std::memory_order_release);
  uint64_t everyone = 0;
  for (int i = 0; i < processes(); ++i) everyone |= uint64_t{1} << i;
  Ring(everyone);
}

Crossing* Arena::Join(const CrossingRequest& request, bool wants_channel) {
  const auto relaxed = std::memory_order_relaxed;
  ProcessState& me = process(self());
  me.last.Store(request.call);
  me.last_number.store(request.number, relaxed);
  Lock lock(*this);
  if (!lock || status().failure()) return nullptr;
  const Places places = FindLocked(request.key);
  Crossing* joined = places.found;
  if (joined != nullptr) {
    FailIfCallsDifferLocked(joined, request);
  } else {
    joined = places.free;
    if (joined == nullptr) {
      AskToBeRungLocked();
      return nullptr;
    }
    OpenLocked(joined, request);
  }
  seat(joined, self()).Add(Seat::kCame);
  joined->here.fetch_or(uint64_t{1} << self(), std::memory_order_acq_rel);
  if (wants_channel && joined->error.load(relaxed) == 0) AssignChannelLocked(joined);
  return joined;
}

Arena::Places Arena::FindLocked(const CrossingKey& key) const {
  const auto relaxed = std::memory_order_relaxed;
  const int home = static_cast<int>(key.Hash() % kCrossings);
  Places places;
  for (int probe = 0; probe < kProbes; ++probe) {
    Crossing* const candidate = crossing((home + probe) % kCrossings);
    if (candidate->state.load(relaxed) == Crossing::kFree) {
      if (places.free == nullptr) places.free = candidate;
    } else if (candidate->communicator.load(relaxed) == key.communicator &&
               candidate->group.load(relaxed) == key.group &&
               candidate->run.load(relaxed) == key.run &&
               candidate->tag.load(relaxed) == key.tag &&
               !seat(candidate, self()).Has(Seat::kCame)) {
      // A process that waits for nobody may be several executions ahead: the oldest.
      if (places.found == nullptr ||
          candidate->opened.load(relaxed) < places.found->opened.load(relaxed)) {
        places.found = candidate;
      }
    }
  }
  return places;
}

void Arena::OpenLocked(Crossing* crossing, const CrossingRequest& request) {
  const auto relaxed = std::memory_order_relaxed;
  crossing->communicator.store(request.key.communicator, relaxed);
  crossing->group.store(request.key.group, relaxed);
  crossing->run.store(request.key.run, relaxed);
  crossing->tag.store(request.key.tag, relaxed);
  crossing->members.store(request.members, relaxed);
  crossing->signature.store(request.signature, relaxed);
  crossing->channel.store(-1, relaxed);
  crossing->here.store(0, relaxed);
  crossing->left.store(0, relaxed);
  crossing->error.store(0, relaxed);
  crossing->opened.store(header().opened.fetch_add(1, relaxed), relaxed);
  crossing->call.Store(request.call);
  for (int i = 0; i < processes(); ++i) {
    seat(crossing, i).state.store(0, relaxed);
    seat(crossing, i).written.store(0, relaxed);
    seat(crossing, i).lacks.store(0, relaxed);
    for (int j = 0; j < processes(); ++j) passed(crossing, i, j).store(0, relaxed);
  }
  crossing->state.store(Crossing::kOpen, std::memory_order_release);
}

void Arena::ReturnChannelLocked(Crossing* crossing) {
  const int channel = crossing->channel.exchange(-1, std::memory_order_relaxed);
  if (!IsChannel(channel)) return;
  header().channels.fetch_and(~(1u << channel), std::memory_order_relaxed);
}

void Arena::AssignChannelLocked(Crossing* crossing) {
  const auto relaxed = std::memory_order_relaxed;
  if (crossing->channel.load(relaxed) >= 0) return;
  const bool all_here = crossing->here.load(relaxed) == crossing->members.load(relaxed);
  const uint32_t used = header().channels.load(relaxed);
  const int limit = all_here ? kChannels : kChannels - kReservedChannels;
  // The lowest free one: its pages are there already.
  for (int channel = 0; channel < limit; ++channel) {
    if (used & (1u << channel)) continue;
    header().channels.store(used | (1u << channel), relaxed);
    crossing->channel.store(channel, std::memory_order_release);
    return;
  }
  AskToBeRungLocked();
}

void Arena::AskToBeRungLocked() {
  header().starved.fetch_or(uint64_t{1} << self(), std::memory_order_relaxed);
}

void Arena::TryAssignChannel(Crossing* crossing) {
  if (crossing->channel.load(std::memory_order_acquire) >= 0) return;
  Lock lock(*this);
  if (lock) AssignChannelLocked(crossing);
}

void Arena::CleanUp(Crossing* crossing) {
  uint64_t waiting = 0;
  {
    Lock lock(*this);
    // A process registers under the lock when it finds nothing free. So either it finds
    // what we return here, or we find it in the mask.
    if (lock && CleanUpLocked(crossing)) {
      waiting = header().starved.exchange(0, std::memory_order_relaxed);
    }
  }
  if (waiting != 0) RingAll(waiting);
}

bool Arena::CleanUpLocked(Crossing* crossing) {
  const auto relaxed = std::memory_order_relaxed;
  // The crossing may have been cleaned, or reopened under another key, before we got
  // the lock. The checks below hold for whatever occupies the slot now.
  const uint64_t left = crossing->left.load(std::memory_order_acquire);
  const uint64_t members = crossing->members.load(relaxed);
  if (left != members || left != crossing->here.load(relaxed)) return false;
  ReturnChannelLocked(crossing);
  crossing->state.store(Crossing::kFree, relaxed);
  return true;
}

// One atomic operation says that the process has left. So a kill leaves a true count,
// and leaving twice does no harm.
void Arena::LeaveSeat(Crossing* crossing, int process) {
  const uint64_t members = crossing->members.load(std::memory_order_relaxed);
  seat(crossing, process).Add(Seat::kLeft);
  const uint64_t bit = uint64_t{1} << process;
  const uint64_t left = crossing->left.fetch_or(bit, std::memory_order_acq_rel) | bit;
  if (left == members) CleanUp(crossing);
}

void Arena::Leave(Crossing* crossing) { LeaveSeat(crossing, self()); }

std::vector<std::string> Arena::CallsOf(int process) const {
  std::vector<std::string> calls;
  Lock lock(*this);
  if (!lock) return calls;
  for (int i = 0; i < kCrossings; ++i) {
    const Crossing* const open = crossing(i);
    if (open->state.load(std::memory_order_relaxed) == Crossing::kFree) continue;
    if (seat(open, process).is_taken()) calls.push_back(open->call.Load());
  }
  return calls;
}

uint64_t Arena::WaitForEachOther(uint64_t processes) const {
  struct Wait {
    uint64_t process, lacks;  // masks
  };
  std::vector<Wait> waits;
  uint64_t waiting = 0;
  // Nobody comes to a crossing while we have the lock. If one has come since a process
  // said what it lacks, `here` shows that.
  Lock lock(*this);
  if (!lock || status().failure()) return 0;
  for (int i = 0; i < kCrossings; ++i) {
    const Crossing* const open = crossing(i);
    if (open->state.load(std::memory_order_relaxed) == Crossing::kFree) continue;
    const uint64_t here = open->here.load(std::memory_order_acquire);
    for (uint64_t mask = here & processes; mask != 0; mask &= mask - 1) {
      const Seat& its = seat(open, __builtin_ctzll(mask));
      if (!its.is_taken()) continue;
      const uint64_t process = mask & -mask;
      waits.push_back({process, its.lacks.load(std::memory_order_acquire) & ~here});
      waiting |= process;
    }
  }
  // Who can still go on leaves the set; then perhaps another one can.
  for (uint64_t before = 0; before != waiting;) {
    before = waiting;
    for (const Wait& wait : waits) {
      if ((wait.lacks & waiting) == 0) waiting &= ~wait.process;
    }
  }
  return waiting;
}

uint64_t Arena::standing_still() const {
  uint64_t still = 0;
  for (int i = 0; i < processes(); ++i) {
    if (process(i).stands_still.load(std::memory_order_acquire))
      still |= uint64_t{1} << i;
  }
  return still;
}

void Arena::Abandon(Crossing* crossing, int process) {
  // Several survivors may try. Leaving twice does no harm. If another crossing has the
  // slot by now, the ended process is not seated in it.
  if (seat(crossing, process).is_taken()) LeaveSeat(crossing, process);
}

void Arena::ReleaseHoldings(uint64_t ended) {
  const auto relaxed = std::memory_order_relaxed;
  uint64_t waiting = 0;
  {
    Lock lock(*this);
    if (!lock) return;
    for (int i = 0; i < kCrossings; ++i) {
      Crossing* const open = crossing(i);
      if (open->state.load(relaxed) == Crossing::kFree) continue;
      const uint64_t seated = open->here.load(relaxed) & ~open->left.load(relaxed);
      bool is_incomplete = false;
      for (uint64_t mask = seated & ended; mask != 0; mask &= mask - 1) {
        const int process = __builtin_ctzll(mask);
        Seat& its = seat(open, process);
        if (!its.Has(Seat::kHoldsOperand) && open->error.load(relaxed) == 0) {
          is_incomplete = true;  // its bytes will never come
          continue;
        }
        its.Add(Seat::kLeft);
        open->left.fetch_or(uint64_t{1} << process, std::memory_order_acq_rel);
      }
      if (is_incomplete && (seated & ~ended) == 0) {
        // Nobody waits in it. A process that comes later opens another one, finds that
        // a member has ended, and reports that with more detail than we have here.
        ReturnChannelLocked(open);
        open->state.store(Crossing::kFree, relaxed);
      }
      CleanUpLocked(open);
    }
    waiting = header().starved.exchange(0, relaxed);
  }
  RingAll(waiting);
}

void Arena::Fail(Crossing* crossing, const Status& error) {
  Lock lock(*this);
  if (!lock || crossing->error.load(std::memory_order_relaxed) != 0) return;
  FailLocked(crossing, *error.errc(), error.message());
}

void Arena::FailAll(const Status& error) {
  if (status().failure()) return;
  Lock lock(*this);
  if (lock) FailAllLocked(error.message());
}

void Arena::FailLocked(Crossing* crossing, ErrorCode code, std::string_view text) {
  crossing->failure.Store(text);
  crossing->error.store(static_cast<uint32_t>(code), std::memory_order_release);
  // After the crossing's: its members report that.
  FailAllLocked(text);
}

void Arena::FailAllLocked(std::string_view text) {
  if (status().success()) {
    header().first.text.Store(text);
    header().first.process.store(static_cast<uint32_t>(names_[self_]) + 1,
                                 std::memory_order_release);
  }
  RingAll(everyone());
}

void Arena::FailIfCallsDifferLocked(Crossing* crossing,
                                    const CrossingRequest& request) {
  const auto relaxed = std::memory_order_relaxed;
  if (crossing->error.load(relaxed) != 0 ||
      crossing->signature.load(relaxed) == request.signature) {
    return;
  }
  const std::string text =
      StrCat("a rank of process ", names_[self_], " called ", request.call,
             " where the ranks before it called ", crossing->call.Load(),
             "; every rank must run the same collectives in the same order");
  FailLocked(crossing, ErrorCode::kInvalidArgument, text);
}

void Arena::RingAll(uint64_t mask) const {
  Ring(mask);
  // A handler of this process may have returned what its progress thread waits for.
  if ((mask >> self_ & 1) != 0) RingSelf();
}

void Arena::Ring(uint64_t mask) const {
  // Publish first, then look who sleeps. The sleeper announces its sleep first, then
  // looks for work.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (mask &= ~(uint64_t{1} << self_); mask != 0; mask &= mask - 1) {
    process(__builtin_ctzll(mask)).doorbell.Ring();
  }
}

}  // namespace jaxcomm
