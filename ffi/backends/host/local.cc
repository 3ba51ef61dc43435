#include "ffi/backends/host/local.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "ffi/backends/host/continuer.h"
#include "ffi/backends/host/cores.h"
#include "ffi/backends/host/execute.h"
#include "ffi/backends/host/huge_pages.h"
#include "ffi/backends/host/watchdog.h"
#include "ffi/flight_dump.h"
#include "ffi/handlers/collectives.h"

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

LocalCommunicator::LocalCommunicator(CommunicatorSpec spec)
    : Communicator(std::move(spec)) {
  static std::atomic<uint64_t> next_id{1};
  const CommunicatorSpec& of = this->spec();
  for (size_t index = 0; index < of.groups.size(); ++index) {
    auto group = std::make_unique<Group>();
    group->devices = of.groups[index];
    group->index = index;
    group->id = next_id.fetch_add(1);
    group->calls.assign(kNumCollectives, 0);
    if (of.process_set != nullptr) {
      const std::vector<int>& processes = of.processes[index];
      const int self = of.process_set->arena().self();
      // Groups of other processes are none of ours.
      if (std::find(processes.begin(), processes.end(), self) == processes.end()) {
        continue;
      }
      for (int process : processes) group->members |= uint64_t{1} << process;
      if ((group->members & (group->members - 1)) != 0) group->process_of = processes;
    }
    for (int rank = 0; rank < static_cast<int>(group->devices.size()); ++rank) {
      if (of.process_set != nullptr &&
          of.processes[index][rank] != of.process_set->arena().self()) {
        continue;
      }
      group->here.push_back(rank);
      members_[group->devices[rank]] = {static_cast<int>(groups_.size()), rank};
    }
    groups_.push_back(std::move(group));
  }
}

LocalCommunicator::~LocalCommunicator() {
  Abort(FailedPrecondition("the communicator was destroyed"));
}

ffi::Future LocalCommunicator::Execute(const Call& call) {
  const auto member = members_.find(call.device_id);
  if (member == members_.end()) {
    return FailedFuture(InvalidArgument(
        call.site->ToString(), " over axes ", spec().axes, ": device ", spec().platform,
        ":", call.device_id,
        " is not part of this communicator. Call jaxcomm.init with the mesh the "
        "program runs on."));
  }
  Group& group = *groups_[member->second.group];
  const int rank = member->second.rank;
  const int size = static_cast<int>(group.devices.size());

  for (size_t leaf = 0; leaf < call.site->results().size(); ++leaf) {
    const int64_t bytes = call.site->results()[leaf].bytes();
    if (bytes >= kOftenFreshBytes) AdviseHugePages(call.results[leaf], bytes);
  }

  const FlightRecorder::Ticket ticket = recorder().Start(
      *call.site, call.run_id, call.shared_tag, static_cast<int>(group.index), rank);
  ffi::Promise promise;
  ffi::Future future(promise);
  std::unique_lock<std::mutex> lock(group.mutex);
  if (group.closed.failure()) {
    Status closed = group.closed;
    lock.unlock();
    Land(ticket, closed);
    promise.SetError(std::move(closed));
    return future;
  }
  for (auto it = group.tombstones.begin(); it != group.tombstones.end(); ++it) {
    if (it->run_id != call.run_id || it->tag != call.tag) continue;
    Status reason = it->reason;
    if (--it->absent == 0) group.tombstones.erase(it);
    lock.unlock();
    Land(ticket, reason);
    promise.SetError(std::move(reason));
    return future;
  }

  // A rank meets the others in the order of its own executions: the oldest
  // meeting of this run and site at which it has not been.
  Meeting* meeting = nullptr;
  for (auto& known : group.active) {
    if (known->run_id == call.run_id && known->tag == call.tag &&
        known->seats[rank].state == Seat::kAbsent) {
      meeting = known.get();
      break;
    }
  }
  if (meeting == nullptr) {
    auto opened = Open(group, call);
    if (!call.site->plan_reads_operands()) {
      Status status = call.site->GetPlan(size, &opened->plan);
      if (status.success()) status = CheckReducible(*call.site, *opened->plan);
      if (status.failure()) {
        group.free.push_back(std::move(opened));
        lock.unlock();
        Land(ticket, status);
        promise.SetError(std::move(status));
        return future;
      }
      if (opened->plan->pairwise && group.process_of.empty()) {
        const auto& moves = opened->plan->moves;
        opened->waiting_for.resize(moves.size());
        for (auto& seat : opened->seats) seat.moves_left = 0;
        for (int r = 0; r < size; ++r) {
          opened->seats[r].moves_left =
              static_cast<int>(opened->plan->moves_of[r].size());
          for (int index : opened->plan->moves_of[r]) ++opened->waiting_for[index];
        }
      }
    }
    meeting = opened.get();
    group.active.push_back(std::move(opened));
  } else if (meeting->signature != call.site->signature()) {
    const std::string what =
        StrCat("over axes ", spec().axes, ": ", Where(group, rank), " called ",
               call.site->ToString(), " where the ranks before it called ",
               meeting->call_site->ToString(),
               "; every rank must run the same collectives in the same order");
    std::vector<Continuation> failures =
        Fail(group, meeting, {ErrorCode::kInvalidArgument, what});
    Status status(ErrorCode::kInvalidArgument, what);
    auto mine = std::find_if(
        group.tombstones.begin(), group.tombstones.end(), [&](const Tombstone& stone) {
          return stone.run_id == call.run_id && stone.tag == call.tag;
        });
    if (mine != group.tombstones.end() && --mine->absent == 0) {
      group.tombstones.erase(mine);
    }
    lock.unlock();
    Land(ticket, status);
    DumpFlightRecords("mismatch");
    Continue(std::move(failures), std::make_shared<Gap>());
    promise.SetError(std::move(status));
    return future;
  }

  Seat& seat = meeting->seats[rank];
  seat.state = Seat::kWaiting;
  seat.ticket = ticket;
  seat.operands.assign(call.operands, call.operands + call.site->operands().size());
  seat.results.assign(call.results, call.results + call.site->results().size());
  seat.promise.push_back(std::move(promise));
  meeting->operands[rank] = seat.operands.data();
  meeting->results[rank] = seat.results.data();
  ++meeting->arrived;
  group.bytes += call.site->operand_bytes();

  if (meeting->plan != nullptr && meeting->plan->pairwise && group.process_of.empty()) {
    return ArrivePairwise(group, rank, call, std::move(lock), meeting,
                          std::move(future));
  }
  return ArriveTogether(group, rank, call, std::move(lock), meeting, std::move(future));
}

ffi::Future LocalCommunicator::ArriveTogether(Group& group, int rank, const Call& call,
                                              std::unique_lock<std::mutex> lock,
                                              Meeting* meeting, ffi::Future future) {
  if (meeting->arrived < static_cast<int>(group.here.size())) {
    SpinBriefly(group, rank, std::move(lock), meeting);
    return future;
  }
  // Everybody is here: nobody else will look this meeting up.
  auto it = std::find_if(group.active.begin(), group.active.end(),
                         [&](const auto& known) { return known.get() == meeting; });
  std::unique_ptr<Meeting> owned = std::move(*it);
  group.active.erase(it);
  ++group.calls[call.site->collective_index()];
  const int waiting = owned->spinning;
  lock.unlock();

  if (!group.process_of.empty()) {
    Cross(group, rank, call, std::move(owned), waiting);
    return future;
  }
  const int size = static_cast<int>(group.devices.size());
  Status status;
  const GroupBuffers buffers{owned->operands.data(), owned->results.data()};
  if (call.site->plan_reads_operands()) {
    owned->own_plan = Plan();
    status = call.site->MakePlan(size, owned->operands.data(), &owned->own_plan);
    owned->plan = &owned->own_plan;
    if (status.failure()) {
      status = Status(*status.errc(), StrCat(call.site->ToString(), " over axes ",
                                             spec().axes, ": ", status.message()));
    }
  }
  std::shared_ptr<SharedBlocks> offered;
  if (status.success()) {
    owned->all_moves.resize(owned->plan->moves.size());
    for (size_t i = 0; i < owned->all_moves.size(); ++i) {
      owned->all_moves[i] = static_cast<int>(i);
    }
    offered = RunMoves(*call.site, *owned->plan, owned->all_moves, buffers,
                       call.scheduler, &owned->offer, waiting);
  }

  if (offered != nullptr) owned->offered.push_back(std::move(offered));
  Complete(group, std::move(owned), rank, std::move(status));
  return future;
}

void LocalCommunicator::Complete(Group& group, std::unique_ptr<Meeting> meeting,
                                 int rank, Status status) {
  const std::shared_ptr<Gap> gap = meeting->call_site->gap();
  std::vector<Continuation> others;
  others.reserve(group.here.size());
  std::vector<ffi::Promise> mine;
  {
    std::lock_guard<std::mutex> lock(group.mutex);
    for (int other : group.here) {
      Seat& seat = meeting->seats[other];
      if (other == rank) {
        Land(seat.ticket, status);
        mine.push_back(std::move(seat.promise.front()));
      } else {
        Settle(seat, status, &others);
      }
    }
    Recycle(group, std::move(meeting));
  }
  jaxcomm::Continue(std::move(others), gap);
  for (ffi::Promise& promise : mine) {
    if (status.failure()) {
      promise.SetError(std::move(status));
    } else {
      promise.SetAvailable();
    }
  }
}

ffi::Future LocalCommunicator::ArrivePairwise(Group& group, int rank, const Call& call,
                                              std::unique_lock<std::mutex> lock,
                                              Meeting* meeting, ffi::Future future) {
  const Plan& plan = *meeting->plan;
  std::vector<int> ready;
  for (int index : plan.moves_of[rank]) {
    if (--meeting->waiting_for[index] == 0) ready.push_back(index);
  }
  std::vector<Continuation> others;
  std::vector<Continuation> mine;
  const auto finish = [&](int done) {
    Seat& seat = meeting->seats[done];
    if (seat.state != Seat::kWaiting || seat.moves_left > 0) return;
    seat.state = Seat::kDone;
    --meeting->left;
    Settle(seat, OkStatus(), done == rank ? &mine : &others);
  };
  if (!ready.empty()) {
    ++meeting->moving;  // keeps a deadline from pulling the buffers away
    const int waiting = meeting->spinning;
    // With more ranks than cores the other cores are busy with moves of their own.
    Scheduler* const scheduler =
        static_cast<int>(group.devices.size()) > Cores() ? nullptr : call.scheduler;
    lock.unlock();
    const GroupBuffers buffers{meeting->operands.data(), meeting->results.data()};
    auto offered =
        RunMoves(*call.site, plan, ready, buffers, scheduler, &meeting->offer, waiting);
    lock.lock();
    if (offered != nullptr) meeting->offered.push_back(std::move(offered));
    --meeting->moving;
    for (int index : ready) {
      const Move& move = plan.moves[index];
      std::vector<int> involved = move.targets;
      for (int source : move.sources) {
        if (std::find(involved.begin(), involved.end(), source) == involved.end()) {
          involved.push_back(source);
        }
      }
      for (int other : involved) --meeting->seats[other].moves_left;
      for (int other : involved) finish(other);
    }
  }
  finish(rank);  // a rank that neither sends nor receives
  const bool waits = meeting->seats[rank].state == Seat::kWaiting;
  if (meeting->left == 0) {
    ++group.calls[call.site->collective_index()];
    Close(group, meeting);
  }
  Continue(std::move(others), call.site->gap());
  if (waits) {
    SpinBriefly(group, rank, std::move(lock), meeting);
    return future;
  }
  lock.unlock();
  for (Continuation& continuation : mine) continuation.promise.SetAvailable();
  return future;
}

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

std::unique_ptr<LocalCommunicator::Meeting> LocalCommunicator::Open(Group& group,
                                                                    const Call& call) {
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
  return meeting;
}

void LocalCommunicator::Close(Group& group, Meeting* meeting) {
  auto it = std::find_if(group.active.begin(), group.active.end(),
                         [&](const auto& known) { return known.get() == meeting; });
  std::unique_ptr<Meeting> over = std::move(*it);
  group.active.erase(it);
  Recycle(group, std::move(over));
}

CommunicatorStats LocalCommunicator::stats() const {
  CommunicatorStats stats;
  std::vector<int64_t> calls(kNumCollectives, 0);
  stats.host_bytes = sizeof(*this);
  for (const auto& group : groups_) {
    std::lock_guard<std::mutex> lock(group->mutex);
    stats.bytes += group->bytes;
    stats.in_flight +=
        static_cast<int64_t>(group->active.size() + group->crossing.size());
    stats.host_bytes +=
        sizeof(Group) + (group->active.size() + group->free.size()) *
                            (sizeof(Meeting) + group->devices.size() * sizeof(Seat));
    for (int i = 0; i < kNumCollectives; ++i) {
      calls[i] = std::max(calls[i], group->calls[i]);
    }
  }
  for (int i = 0; i < kNumCollectives; ++i) {
    if (calls[i] > 0) stats.calls.emplace_back(kCollectives[i].name, calls[i]);
  }
  return stats;
}

std::shared_ptr<Communicator> MakeLocalCommunicator(CommunicatorSpec spec) {
  const double timeout_seconds = spec.timeout_seconds;
  auto communicator = std::make_shared<LocalCommunicator>(std::move(spec));
  WatchDeadlines(communicator, timeout_seconds);
  return communicator;
}

}  // namespace jaxcomm
