// How a crossing fails, and how those hear of it who are done with it.
#include <string>

#include "ffi/backends/host/arena.h"

namespace jaxcomm {
namespace {

// Each step of a collective is a crossing of its own: see RoundCarrier::RequestOf().
uint64_t GroupOf(const Crossing* crossing) {
  return crossing->group.load(std::memory_order_relaxed) / 2;
}

bool IsSeated(uint32_t state) { return state == Seat::kHere || state == Seat::kReady; }

}  // namespace

void Arena::Fail(Crossing* crossing, const Status& error) {
  {
    Lock lock(*this);
    if (!lock || crossing->error.load(std::memory_order_relaxed) != 0) return;
    FailLocked(crossing, *error.errc(), error.message());
  }
  Ring(crossing->members.load(std::memory_order_relaxed));
}

void Arena::FailLocked(Crossing* crossing, ErrorCode code, std::string_view text) {
  crossing->failure.Store(text);
  crossing->error.store(static_cast<uint32_t>(code), std::memory_order_release);
}

void Arena::FailIfCallsDifferLocked(Crossing* crossing, uint64_t signature,
                                    std::string_view call) {
  const auto relaxed = std::memory_order_relaxed;
  if (crossing->error.load(relaxed) != 0 ||
      crossing->signature.load(relaxed) == signature) {
    return;
  }
  const std::string text =
      StrCat("a rank of process ", names_[self_], " called ", call,
             " where the ranks before it called ", crossing->call.Load(),
             "; every rank must run the same collectives in the same order");
  FailLocked(crossing, ErrorCode::kInvalidArgument, text);
  TellThoseWhoLeftLocked(crossing, text);
}

void Arena::TellThoseWhoLeftLocked(const Crossing* crossing, const std::string& text) {
  const auto relaxed = std::memory_order_relaxed;
  for (uint64_t mask = crossing->members.load(relaxed); mask != 0; mask &= mask - 1) {
    const int member = __builtin_ctzll(mask);
    if (seat(crossing, member).state.load(relaxed) != Seat::kLeft) continue;
    const std::string told = StrCat("an operation that had ended in process ",
                                    names_[member], " failed in others: ", text);
    ProcessState& state = process(member);
    state.unheard.Store(told);
    state.unheard_of_group.store(GroupOf(crossing), relaxed);
    state.unheard_of.store(crossing->communicator.load(relaxed), relaxed);
    Crossing* const next = OldestOfGroupLocked(crossing, member);
    if (next == nullptr) continue;
    FailLocked(next, ErrorCode::kInvalidArgument, told);
    // This process may itself wait there, on a thread that sleeps.
    RingAll(next->members.load(relaxed));
  }
}

Crossing* Arena::OldestOfGroupLocked(const Crossing* like, int process) const {
  const auto relaxed = std::memory_order_relaxed;
  Crossing* oldest = nullptr;
  for (int i = 0; i < kCrossings; ++i) {
    Crossing* const open = crossing(i);
    if (open->state.load(relaxed) != Crossing::kFree &&
        open->communicator.load(relaxed) == like->communicator.load(relaxed) &&
        GroupOf(open) == GroupOf(like) &&
        IsSeated(seat(open, process).state.load(relaxed)) &&
        open->error.load(relaxed) == 0 &&
        (oldest == nullptr ||
         open->opened.load(relaxed) < oldest->opened.load(relaxed))) {
      oldest = open;
    }
  }
  return oldest;
}

bool Arena::IsUnheard(const Crossing* crossing) const {
  const auto relaxed = std::memory_order_relaxed;
  const ProcessState& me = process(self_);
  return me.unheard_of.load(relaxed) == crossing->communicator.load(relaxed) &&
         me.unheard_of_group.load(relaxed) == GroupOf(crossing);
}

void Arena::FailIfUnheardLocked(Crossing* crossing) {
  if (crossing->error.load(std::memory_order_relaxed) != 0) return;
  if (!IsUnheard(crossing)) return;
  FailLocked(crossing, ErrorCode::kInvalidArgument, process(self_).unheard.Load());
}

void Arena::Heard(const Crossing* crossing) {
  std::atomic<uint64_t>& unheard_of = process(self_).unheard_of;
  if (unheard_of.load(std::memory_order_relaxed) == 0) return;
  Lock lock(*this);
  if (lock && IsUnheard(crossing)) unheard_of.store(0, std::memory_order_relaxed);
}

void Arena::Abandon(Crossing* crossing, int process) {
  // Several survivors may try. Leaving twice does no harm, but leaving another crossing
  // would, which has the slot by now: an ended process has come to none of later.
  if (IsSeated(seat(crossing, process).state.load(std::memory_order_acquire))) {
    LeaveSeat(crossing, process);
  }
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
        std::atomic<uint32_t>& state = seat(open, process).state;
        if (state.load(relaxed) == Seat::kHere && open->error.load(relaxed) == 0) {
          is_incomplete = true;  // its bytes will never come
          continue;
        }
        state.store(Seat::kLeft, std::memory_order_release);
        open->left.fetch_or(uint64_t{1} << process, std::memory_order_acq_rel);
      }
      if (is_incomplete && (seated & ~ended) == 0) {
        // Nobody waits in it. A process that comes later opens another one, finds that
        // a member has ended, and says more about it than can be said here. So do the
        // processes that wait in an incomplete crossing.
        ReturnChannelLocked(open);
        open->state.store(Crossing::kFree, relaxed);
      }
      CleanUpLocked(open);
    }
    waiting = starved().exchange(0, relaxed);
  }
  RingAll(waiting);
}

}  // namespace jaxcomm
