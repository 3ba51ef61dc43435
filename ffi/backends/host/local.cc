#include "ffi/backends/host/local.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "ffi/backends/host/continuer.h"
#include "ffi/backends/host/execute.h"
#include "ffi/backends/host/huge_pages.h"
#include "ffi/flight/flight_dump.h"
#include "ffi/os/cores.h"

namespace jaxcomm {
namespace {

namespace ffi = xla::ffi;

// Of communicators and of groups.
std::atomic<uint64_t> next_id{1};

}  // namespace

LocalCommunicator::LocalCommunicator(CommunicatorSpec spec)
    : Communicator(std::move(spec)), id_(next_id.fetch_add(1)) {
  const CommunicatorSpec& of = this->spec();
  for (size_t index = 0; index < of.groups.size(); ++index) {
    auto group = std::make_unique<Group>();
    group->devices = of.groups[index];
    group->index = index;
    group->id = next_id.fetch_add(1);
    group->calls.assign(Plan::kKinds, 0);
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
  // The process set has nothing of ours: what it carries on keeps us alive.
  AbortMeetings(FailedPrecondition("the communicator was destroyed"));
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

  for (size_t leaf = 0; leaf < call.site->results().size(); ++leaf) {
    const int64_t bytes = call.site->results()[leaf].bytes();
    if (bytes >= kOftenFreshBytes) AdviseHugePages(call.results[leaf], bytes);
  }

  const FlightRecorder::Ticket ticket =
      recorder().Start(call.site->operation(), call.run_id, call.shared_tag,
                       static_cast<int>(group.index), rank);
  std::unique_lock<std::mutex> lock(group.mutex);
  const auto refuse = [&](Status reason) {
    lock.unlock();
    Land(ticket, reason);
    return FailedFuture(std::move(reason));
  };
  if (Status reason = ReasonNotToWait(group, call); reason.failure()) {
    return refuse(std::move(reason));
  }

  // A rank meets the others in the order of its own executions: the oldest
  // meeting of this run and site at which it has not been.
  Meeting* meeting = nullptr;
  for (auto& known : group.active) {
    if (known->run_id != call.run_id) continue;
    const Seat::State state = known->seats[rank].state;
    if (state == Seat::kWaiting) {
      known->call_site->gap()->overlaps.store(true, std::memory_order_relaxed);
    } else if (state == Seat::kAbsent && known->tag == call.tag) {
      meeting = known.get();
      break;
    }
  }
  if (meeting == nullptr) {
    Status status = Open(group, call, &meeting);
    if (status.failure()) return refuse(std::move(status));
  }
  if (!group.process_of.empty()) {
    recorder().SetRun(ticket, static_cast<int64_t>(meeting->run));
  }
  if (meeting->signature != call.site->signature()) {
    return FailedFuture(Mismatch(group, rank, call, std::move(lock), meeting, ticket));
  }

  // The ranks that are done waited for none of those that are missing: the time of the
  // missing ones begins with the first of them.
  if (meeting->arrived > 0 && !HasWaiting(*meeting)) {
    meeting->first_arrival = Clock::now();
  }
  ffi::Promise promise;
  ffi::Future future(promise);
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
    WaitBriefly(group, rank, std::move(lock), meeting);
    return future;
  }
  // Everybody is here: nobody else will look this meeting up.
  auto it = std::find_if(group.active.begin(), group.active.end(),
                         [&](const auto& known) { return known.get() == meeting; });
  std::unique_ptr<Meeting> owned = std::move(*it);
  group.active.erase(it);
  ++group.calls[static_cast<int>(call.site->kind())];
  const int waiting = owned->looking_out + WakeHelpers(*owned);
  lock.unlock();

  if (!group.process_of.empty()) {
    Cross(group, rank, call, std::move(owned), waiting);
    return future;
  }
  const int size = static_cast<int>(group.devices.size());
  Status status;
  const GroupBuffers buffers{owned->operands.data(), owned->results.data()};
  if (call.site->plan_reads_operands()) {
    owned->own_plan = HostPlan();
    status = MakeHostPlan(*call.site, size, owned->operands.data(), &owned->own_plan);
    owned->plan = &owned->own_plan;
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
  const HostPlan& plan = *meeting->plan;
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
    const int waiting = meeting->looking_out;
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
      std::vector<int> involved(move.targets.begin(), move.targets.end());
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
  bool waits = meeting->seats[rank].state == Seat::kWaiting;
  if (group.closed.failure() && meeting->moving == 0 && meeting->left > 0) {
    // Closed while bytes moved, and the ranks that are missing will be refused.
    const Failure closed{*group.closed.errc(), group.closed.message()};
    for (Continuation& failure : Fail(group, meeting, closed)) {
      others.push_back(std::move(failure));
    }
    waits = false;
  } else if (meeting->left == 0) {
    ++group.calls[static_cast<int>(call.site->kind())];
    Close(group, meeting);
  }
  Continue(std::move(others), call.site->gap());
  if (waits) {
    WaitBriefly(group, rank, std::move(lock), meeting);
    return future;
  }
  lock.unlock();
  for (Continuation& continuation : mine) continuation.promise.SetAvailable();
  return future;
}

CommunicatorStats LocalCommunicator::stats() const {
  CommunicatorStats stats;
  std::vector<int64_t> calls(Plan::kKinds, 0);
  stats.host_bytes = sizeof(*this);
  for (const auto& group : groups_) {
    std::lock_guard<std::mutex> lock(group->mutex);
    stats.bytes += group->bytes;
    stats.in_flight +=
        static_cast<int64_t>(group->active.size() + group->crossing.size());
    stats.host_bytes +=
        sizeof(Group) + (group->active.size() + group->free.size()) *
                            (sizeof(Meeting) + group->devices.size() * sizeof(Seat));
    for (int i = 0; i < Plan::kKinds; ++i) {
      calls[i] = std::max(calls[i], group->calls[i]);
    }
  }
  for (int i = 0; i < Plan::kKinds; ++i) {
    if (calls[i] > 0) stats.calls.emplace_back(KindName(Plan::Kind(i)), calls[i]);
  }
  return stats;
}

std::shared_ptr<Communicator> MakeLocalCommunicator(CommunicatorSpec spec) {
  // A timeout is noticed at most a tenth of its length late.
  const double period = std::clamp(spec.timeout_seconds / 10, 0.01, 1.0);
  auto communicator = std::make_shared<LocalCommunicator>(std::move(spec));
  Status status = StartContinuing();
  if (status.success()) status = Watch(communicator, period);
  if (status.failure()) communicator->Abort(status);
  WakeWatchdog();
  return communicator;
}

}  // namespace jaxcomm
