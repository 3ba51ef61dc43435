// The life of a local communicator's meetings, and how a rank waits in one.
#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/host/continuer.h"
#include "ffi/backends/host/execute.h"
#include "ffi/backends/host/local.h"
#include "ffi/os/cores.h"

namespace jaxcomm {
namespace {

namespace ffi = xla::ffi;

// How a rank waits for those that are missing, on its own thread, before it leaves its
// promise to be completed by another.
//
// Where each of them has a core beside it, it looks out for them this long: being woken
// takes longer than a small collective, and whoever looks out can help to move a large
// one. (Also among up to twice as many ranks as cores, those that come last: 256 B
// among 4 on 2 cores, psum 1.07 -> 1.11 of jax.lax's speed, all_to_all 1.11 -> 1.25.)
constexpr auto kSpin = std::chrono::microseconds(100);
// Among more ranks than cores it sleeps, this long, if the collective is large. XLA's
// thread waits for the end of its program anyway, and a rank that goes on where it was
// needs no other thread to be woken, nor fetches its data there. (Scan of 20 psums of
// 256 KiB and products, 8 ranks on 2 cores: 0.99 -> 1.06 of jax.lax's speed.)
constexpr auto kSleep = std::chrono::milliseconds(5);
// Among more ranks than cores it does neither where the program has other collectives
// for it to begin meanwhile: of so many meetings of a call site the first few are
// watched for that.
constexpr uint64_t kWatchEvery = 256;
constexpr uint64_t kWatched = 4;
// Nor, for so many meetings, after it slept in vain: who is missing may wait for this
// rank elsewhere, in a collective of XLA's.
constexpr int kRest = 64;

// Runs of one program that may be under way at a time.
constexpr size_t kRecentRuns = 64;

// What all ranks hand in from which it pays to help, or to sleep.
constexpr int64_t kLargeBytes = 256 << 10;

}  // namespace

void LocalCommunicator::Land(FlightRecorder::Ticket ticket, const Status& status) {
  recorder().Finish(ticket, status.success() ? FlightRecorder::State::kCompleted
                                             : FlightRecorder::State::kFailed);
}

void LocalCommunicator::Settle(Seat& seat, Status status,
                               std::vector<Continuation>* out) {
  Land(seat.ticket, status);
  if (seat.stay != Seat::kNone) {
    seat.status = std::move(status);
    seat.settled.store(true, std::memory_order_release);
    if (seat.stay == Seat::kSleeps) seat.woken.notify_one();
    return;
  }
  out->push_back({std::move(seat.promise.front()), std::move(status)});
  seat.promise.clear();
}

void LocalCommunicator::LookOut(const Seat& seat, const Offer& offer) {
  SharedBlocks* helped = nullptr;
  Clock::time_point end = Clock::now() + kSpin;
  for (int i = 1; !seat.settled.load(std::memory_order_acquire); ++i) {
    SharedBlocks* const blocks = offer.load(std::memory_order_acquire);
    if (blocks != nullptr && blocks != helped) {
      helped = blocks;
      blocks->Work();
      end = Clock::now() + kSpin;
    }
    Pause();
    if (i % 16 == 0 && Clock::now() >= end) break;
    // The core may be wanted by the program of the rank that is waited for.
    if (i % 16 == 0) std::this_thread::yield();
  }
}

bool LocalCommunicator::IsAlone(const Meeting& meeting) {
  Gap& gap = *meeting.call_site->gap();
  const uint64_t before = gap.meetings.fetch_add(1, std::memory_order_relaxed);
  if (before % kWatchEvery < kWatched) return false;
  if (gap.rest.load(std::memory_order_relaxed) > 0) {
    gap.rest.fetch_sub(1, std::memory_order_relaxed);
    return false;
  }
  return !gap.overlaps.load(std::memory_order_relaxed);
}

LocalCommunicator::Seat::Stay LocalCommunicator::HowToStay(const Group& group,
                                                           const Meeting& meeting) {
  const int size = static_cast<int>(group.here.size());
  const bool large = meeting.call_site->operand_bytes() * size >= kLargeBytes;
  const bool pairwise = meeting.plan != nullptr && meeting.plan->pairwise;
  // The ranks that are missing come first.
  const Seat::Stay if_cores_are_left =
      size - meeting.arrived < Cores() ? Seat::kLooksOut : Seat::kNone;
  if (size <= Cores() || (large && pairwise)) return if_cores_are_left;
  if (!meeting.is_alone || OnContinuer()) return Seat::kNone;
  if (large) return Seat::kSleeps;
  // With more ranks, those that left complete sooner if all cores are theirs.
  return size <= 2 * Cores() ? if_cores_are_left : Seat::kNone;
}

int LocalCommunicator::WakeHelpers(Meeting& meeting) {
  int woken = 0;
  for (Seat& seat : meeting.seats) {
    if (meeting.looking_out + woken + 1 >= Cores()) break;
    if (seat.stay != Seat::kSleeps) continue;
    seat.stay = Seat::kLooksOut;
    seat.woken.notify_one();
    ++woken;
  }
  return woken;
}

void LocalCommunicator::WaitBriefly(Group& group, int rank,
                                    std::unique_lock<std::mutex> lock,
                                    Meeting* meeting) {
  Seat& seat = meeting->seats[rank];
  seat.stay = HowToStay(group, *meeting);
  if (seat.stay == Seat::kNone) return;
  ++meeting->staying;
  if (seat.stay == Seat::kSleeps) {
    const bool woken = seat.woken.wait_for(lock, kSleep, [&seat] {
      return seat.stay != Seat::kSleeps || seat.settled.load(std::memory_order_relaxed);
    });
    if (!woken) meeting->call_site->gap()->rest.store(kRest, std::memory_order_relaxed);
  }
  if (seat.stay == Seat::kLooksOut) {
    ++meeting->looking_out;
    lock.unlock();
    LookOut(seat, meeting->offer);
    lock.lock();
    --meeting->looking_out;
  }
  seat.stay = Seat::kNone;
  --meeting->staying;
  if (!seat.settled.load(std::memory_order_relaxed)) return;
  ffi::Promise promise = std::move(seat.promise.front());
  Status status = std::move(seat.status);
  seat.promise.clear();
  for (size_t i = 0; i < group.lingering.size() && meeting->staying == 0; ++i) {
    if (group.lingering[i].get() != meeting) continue;
    std::unique_ptr<Meeting> over = std::move(group.lingering[i]);
    group.lingering.erase(group.lingering.begin() + static_cast<int64_t>(i));
    Recycle(group, std::move(over));
    break;
  }
  lock.unlock();
  if (status.success()) {
    promise.SetAvailable();
  } else {
    promise.SetError(std::move(status));
  }
}

void LocalCommunicator::Recycle(Group& group, std::unique_ptr<Meeting> meeting) {
  if (meeting->staying > 0) {
    group.lingering.push_back(std::move(meeting));
    return;
  }
  meeting->offer.store(nullptr, std::memory_order_relaxed);
  meeting->offered.clear();
  group.free.push_back(std::move(meeting));
}

uint64_t LocalCommunicator::NumberOf(Runs& runs, int64_t run_id) {
  for (auto it = runs.recent.rbegin(); it != runs.recent.rend(); ++it) {
    if (it->first == run_id) return it->second;
  }
  runs.recent.emplace_back(run_id, ++runs.count);
  if (runs.recent.size() > kRecentRuns) runs.recent.pop_front();
  return runs.count;
}

Status LocalCommunicator::Open(Group& group, const Call& call, Meeting** opened) {
  std::unique_ptr<Meeting> meeting;
  if (group.free.empty()) {
    meeting = std::make_unique<Meeting>();
    meeting->seats.resize(group.devices.size());
    meeting->operands.resize(group.devices.size());
    meeting->results.resize(group.devices.size());
  } else {
    meeting = std::move(group.free.back());
    group.free.pop_back();
  }
  for (Seat& seat : meeting->seats) {
    seat.state = Seat::kAbsent;
    seat.stay = Seat::kNone;
    seat.settled.store(false, std::memory_order_relaxed);
    seat.promise.clear();
  }
  meeting->staying = 0;
  meeting->looking_out = 0;
  meeting->sequence = ++group.opened;
  if (!group.process_of.empty()) {
    meeting->run = NumberOf(group.runs[call.site->program_tag()], call.run_id);
  }
  meeting->exchange.reset();
  meeting->run_id = call.run_id;
  meeting->tag = call.tag;
  meeting->signature = call.site->signature();
  meeting->call_site = call.site;
  meeting->label = call.site->label();
  meeting->plan = nullptr;
  meeting->arrived = 0;
  meeting->left = static_cast<int>(group.devices.size());
  meeting->moving = 0;
  meeting->waiting_for.clear();
  meeting->first_arrival = Clock::now();
  if (Status status = FindPlan(group, call, meeting.get()); status.failure()) {
    group.free.push_back(std::move(meeting));
    return status;
  }
  meeting->is_alone = IsAlone(*meeting);
  *opened = meeting.get();
  group.active.push_back(std::move(meeting));
  return OkStatus();
}

Status LocalCommunicator::FindPlan(const Group& group, const Call& call,
                                   Meeting* meeting) {
  if (call.site->plan_reads_operands()) return OkStatus();  // once they are there
  const int size = static_cast<int>(group.devices.size());
  RETURN_IF_ERROR(FindHostPlan(*call.site, size, &meeting->plan));
  const HostPlan& plan = *meeting->plan;
  if (!plan.pairwise || !group.process_of.empty()) return OkStatus();
  meeting->waiting_for.resize(plan.moves.size());
  for (int rank = 0; rank < size; ++rank) {
    meeting->seats[rank].moves_left = static_cast<int>(plan.moves_of[rank].size());
    for (int index : plan.moves_of[rank]) ++meeting->waiting_for[index];
  }
  return OkStatus();
}

void LocalCommunicator::Close(Group& group, Meeting* meeting) {
  auto it = std::find_if(group.active.begin(), group.active.end(),
                         [&](const auto& known) { return known.get() == meeting; });
  std::unique_ptr<Meeting> over = std::move(*it);
  group.active.erase(it);
  Recycle(group, std::move(over));
}

}  // namespace jaxcomm
