// The life of a local communicator's meetings, and how a rank waits in one.
#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/host/cores.h"
#include "ffi/backends/host/execute.h"
#include "ffi/backends/host/local.h"

namespace jaxcomm {
namespace {

namespace ffi = xla::ffi;

// A rank looks out for those that are missing this long, on its own thread, where
// each of them has a core beside it: being woken takes longer than a small
// collective, and whoever looks out can help to move a large one.
constexpr auto kSpin = std::chrono::microseconds(100);

// Runs of one program that may be under way at a time.
constexpr size_t kRecentRuns = 64;

// What all ranks hand in from which it pays to help.
constexpr int64_t kLargeBytes = 256 << 10;

}  // namespace

void LocalCommunicator::Land(FlightRecorder::Ticket ticket, const Status& status) {
  recorder().Finish(ticket, status.success() ? FlightRecorder::State::kCompleted
                                             : FlightRecorder::State::kFailed);
}

void LocalCommunicator::Settle(Seat& seat, Status status,
                               std::vector<Continuation>* out) {
  Land(seat.ticket, status);
  if (seat.spins) {
    seat.status = std::move(status);
    seat.settled.store(true, std::memory_order_release);
    return;
  }
  out->push_back({std::move(seat.promise.front()), std::move(status)});
  seat.promise.clear();
}

void LocalCommunicator::SpinBriefly(Group& group, int rank,
                                    std::unique_lock<std::mutex> lock,
                                    Meeting* meeting) {
  // The ranks that are missing come first. A small collective among more ranks than
  // cores is not worth a core either: one thread lets all of them go on.
  const int size = static_cast<int>(group.here.size());
  const bool large = meeting->call_site->operand_bytes() * size >= kLargeBytes;
  if (size - meeting->arrived >= Cores() || (size > Cores() && !large)) return;
  Seat& seat = meeting->seats[rank];
  seat.spins = true;
  ++meeting->spinning;
  lock.unlock();
  SharedBlocks* helped = nullptr;
  Clock::time_point end = Clock::now() + kSpin;
  for (int i = 1; !seat.settled.load(std::memory_order_acquire); ++i) {
    SharedBlocks* const blocks = meeting->offer.load(std::memory_order_acquire);
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
  lock.lock();
  seat.spins = false;
  --meeting->spinning;
  if (!seat.settled.load(std::memory_order_relaxed)) return;
  ffi::Promise promise = std::move(seat.promise.front());
  Status status = std::move(seat.status);
  seat.promise.clear();
  for (size_t i = 0; i < group.lingering.size() && meeting->spinning == 0; ++i) {
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
  if (meeting->spinning > 0) {
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
    seat.spins = false;
    seat.settled.store(false, std::memory_order_relaxed);
    seat.promise.clear();
  }
  meeting->spinning = 0;
  meeting->sequence = ++group.opened;
  if (!group.process_of.empty()) {
    meeting->run = NumberOf(group.runs[call.site->program_tag()], call.run_id);
  }
  meeting->exchange.reset();
  meeting->run_id = call.run_id;
  meeting->tag = call.tag;
  meeting->signature = call.site->signature();
  meeting->call_site = call.site;
  meeting->plan = nullptr;
  meeting->arrived = 0;
  meeting->left = static_cast<int>(group.devices.size());
  meeting->moving = 0;
  meeting->waiting_for.clear();
  meeting->first_arrival = Clock::now();
  if (Status status = MakePlan(group, call, meeting.get()); status.failure()) {
    group.free.push_back(std::move(meeting));
    return status;
  }
  *opened = meeting.get();
  group.active.push_back(std::move(meeting));
  return OkStatus();
}

Status LocalCommunicator::MakePlan(const Group& group, const Call& call,
                                   Meeting* meeting) {
  if (call.site->plan_reads_operands()) return OkStatus();  // once they are there
  const int size = static_cast<int>(group.devices.size());
  Status status = call.site->GetPlan(size, &meeting->plan);
  if (status.success()) status = CheckReducible(*call.site, *meeting->plan);
  if (status.failure()) return status;
  const Plan& plan = *meeting->plan;
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
