#include "ffi/backends/host/crossing_failures.h"

#include <utility>

namespace jaxcomm {
namespace {

// Each step of a collective is a crossing of its own: see MeetingPlace().
uint64_t GroupOf(const Crossing* crossing) {
  return crossing->group.load(std::memory_order_relaxed) / 2;
}

}  // namespace

CrossingFailures::CrossingFailures(std::shared_ptr<Segment> segment,
                                   std::vector<int> names, int self)
    : ArenaMemory(std::move(segment), static_cast<int>(names.size())),
      names_(std::move(names)),
      self_(self) {}

void CrossingFailures::Fail(Crossing* crossing, const Status& error) {
  {
    Lock lock(*this);
    if (!lock || crossing->error.load(std::memory_order_relaxed) != 0) return;
    FailLocked(crossing, *error.errc(), error.message());
  }
  Ring(crossing->members.load(std::memory_order_relaxed));
}

void CrossingFailures::FailLocked(Crossing* crossing, ErrorCode code,
                                  std::string_view text) {
  crossing->failure.Store(text);
  crossing->error.store(static_cast<uint32_t>(code), std::memory_order_release);
}

void CrossingFailures::FailIfCallsDifferLocked(Crossing* crossing, uint64_t signature,
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
  FailThoseWhoLeftLocked(crossing, text);
}

void CrossingFailures::FailThoseWhoLeftLocked(const Crossing* crossing,
                                              const std::string& text) {
  const auto relaxed = std::memory_order_relaxed;
  for (uint64_t mask = crossing->members.load(relaxed); mask != 0; mask &= mask - 1) {
    const int member = __builtin_ctzll(mask);
    if (seat(crossing, member).state.load(relaxed) != Seat::kLeft) continue;
    const std::string text_there = StrCat("an operation that had ended in process ",
                                          names_[member], " failed in others: ", text);
    ProcessState& state = process(member);
    state.late_failure.Store(text_there);
    state.late_failure_group.store(GroupOf(crossing), relaxed);
    state.late_failure_communicator.store(crossing->communicator.load(relaxed),
                                          relaxed);
    Crossing* const next = OldestOfGroupLocked(crossing, member);
    if (next == nullptr) continue;
    FailLocked(next, ErrorCode::kInvalidArgument, text_there);
    // This process may itself wait there, on a thread that sleeps.
    RingAll(next->members.load(relaxed));
  }
}

Crossing* CrossingFailures::OldestOfGroupLocked(const Crossing* like,
                                                int process) const {
  const auto relaxed = std::memory_order_relaxed;
  Crossing* oldest = nullptr;
  for (int i = 0; i < kCrossings; ++i) {
    Crossing* const open = crossing(i);
    if (open->state.load(relaxed) != Crossing::kFree &&
        open->communicator.load(relaxed) == like->communicator.load(relaxed) &&
        GroupOf(open) == GroupOf(like) && IsSeated(open, process) &&
        open->error.load(relaxed) == 0 &&
        (oldest == nullptr ||
         open->opened.load(relaxed) < oldest->opened.load(relaxed))) {
      oldest = open;
    }
  }
  return oldest;
}

bool CrossingFailures::HasLateFailure(const Crossing* crossing) const {
  const auto relaxed = std::memory_order_relaxed;
  const ProcessState& me = process(self_);
  return me.late_failure_communicator.load(relaxed) ==
             crossing->communicator.load(relaxed) &&
         me.late_failure_group.load(relaxed) == GroupOf(crossing);
}

void CrossingFailures::FailIfLateFailureLocked(Crossing* crossing) {
  if (crossing->error.load(std::memory_order_relaxed) != 0) return;
  if (!HasLateFailure(crossing)) return;
  FailLocked(crossing, ErrorCode::kInvalidArgument, process(self_).late_failure.Load());
}

void CrossingFailures::ForgetLateFailure(const Crossing* crossing) {
  std::atomic<uint64_t>& communicator = process(self_).late_failure_communicator;
  if (communicator.load(std::memory_order_relaxed) == 0) return;
  Lock lock(*this);
  if (lock && HasLateFailure(crossing))
    communicator.store(0, std::memory_order_relaxed);
}

void CrossingFailures::RingAll(uint64_t mask) const {
  Ring(mask);
  // A handler of this process may have returned what its progress thread waits for.
  if ((mask >> self_ & 1) != 0) RingSelf();
}

void CrossingFailures::Ring(uint64_t mask) const {
  // Publish first, then look who sleeps. The sleeper announces its sleep first, then
  // looks for work.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (mask &= ~(uint64_t{1} << self_); mask != 0; mask &= mask - 1) {
    process(__builtin_ctzll(mask)).doorbell.Ring();
  }
}

}  // namespace jaxcomm
