// The other half of PeerCopies: how a rank's part ends, in order or not.
#include <algorithm>
#include <chrono>
#include <utility>

#include "ffi/backends/nccl/peer_copies.h"

namespace jaxcomm {
namespace {

// How long a rank waits for another before NCCL is to do it. XLA waits ten seconds for
// the launches of all devices once one of them has failed.
constexpr double kPatienceSeconds = 2;

}  // namespace

bool PeerCopies::IsDecided(const Meeting& meeting, int rank) {
  const std::vector<int>& sources = meeting.plan->parts[rank].sources;
  return meeting.seats[rank].is_decided() &&
         std::all_of(sources.begin(), sources.end(),
                     [&](int source) { return meeting.seats[source].is_decided(); });
}

Status PeerCopies::CheckPeers(const Meeting& meeting, int rank) {
  const PeerPlan::Part& part = meeting.plan->parts[rank];
  const Seat& own = meeting.seats[rank];
  int gone = -1;
  for (int target : part.targets) {
    if (!own.is_decided() && meeting.seats[target].is_over) gone = target;
  }
  for (int source : part.sources) {
    const Seat& seat = meeting.seats[source];
    if (!seat.is_decided() && seat.is_over) gone = source;
  }
  if (gone < 0) return OkStatus();
  return FailedPrecondition("rank ", gone,
                            ", whose program failed, went on without it");
}

PeerCopies::Rest PeerCopies::RestOf(const Meeting& meeting, int rank) {
  const Seat& own = meeting.seats[rank];
  const std::vector<PeerPlan::Part>& parts = meeting.plan->parts;
  Rest rest;
  if (own.sends == Seat::Sends::kLeftToNccl) {
    rest.steps.local = parts[rank].local;
    for (const PeerPlan::Copy& copy : parts[rank].copies) {
      Step send;
      send.kind = Step::Kind::kSend;
      send.leaf = copy.leaf;
      send.from = copy.from;
      send.count = copy.bytes;
      send.peer = copy.target;
      rest.steps.grouped.push_back(send);
    }
  }
  for (int source : parts[rank].sources) {
    if (meeting.seats[source].sends != Seat::Sends::kLeftToNccl) continue;
    for (const PeerPlan::Copy& copy : parts[source].copies) {
      if (copy.target != rank) continue;
      Step receive;
      receive.kind = Step::Kind::kRecv;
      receive.leaf = copy.leaf;
      receive.to = copy.to;
      receive.count = copy.bytes;
      receive.peer = source;
      rest.steps.grouped.push_back(receive);
    }
  }
  if (rest.is_empty()) return rest;  // as nearly always: without allocation
  rest.operands = own.operands;
  rest.results = own.results;
  rest.named = own.named;
  return rest;
}

Status PeerCopies::Done(const void* mark, size_t member, cuda::Stream stream,
                        double timeout_seconds, bool* is_begun, Rest* rest) {
  Lane& lane = *lanes_[member];
  const int rank = lane.member.rank;
  std::unique_lock<std::mutex> lock(mutex_);
  Meeting* const meeting = Find(mark, lane.member);
  *is_begun = meeting != nullptr;
  if (meeting == nullptr) return OkStatus();
  const std::chrono::duration<double> patience(
      lane.late_run == meeting->run_id ? 0
                                       : std::min(timeout_seconds, kPatienceSeconds));
  changed_.wait_for(lock, patience, [&] {
    return failure_.failure() || IsDecided(*meeting, rank) ||
           CheckPeers(*meeting, rank).failure();
  });
  CurrentContext current(library_.cuda, lane.member.context);
  // Also after a failure: whoever is told of it gives the memory back.
  Status status = WaitForCopies(*meeting, rank, stream);
  if (failure_.failure()) return failure_;
  const Status gone = CheckPeers(*meeting, rank);
  if (gone.success() && !IsDecided(*meeting, rank)) {
    const auto leave_to_nccl = [&](int each) {
      Seat& seat = meeting->seats[each];
      if (!seat.is_decided()) seat.sends = Seat::Sends::kLeftToNccl;
    };
    leave_to_nccl(rank);
    for (int source : meeting->plan->parts[rank].sources) leave_to_nccl(source);
    lane.late_run = meeting->run_id;
  }
  if (gone.success()) *rest = RestOf(*meeting, rank);
  if (status.success() && !rest->is_empty()) {
    status = WaitFor(stream, meeting->seats[rank].ready);
  }
  if (status.success() && gone.failure()) {
    status = FailIfOwed(*meeting, rank);
    if (status.success()) status = gone;
  }
  Leave(*meeting, rank);
  return status;
}

Status PeerCopies::Forget(const void* mark, size_t member, cuda::Stream stream) {
  const Lane& lane = *lanes_[member];
  std::lock_guard<std::mutex> lock(mutex_);
  CurrentContext current(library_.cuda, lane.member.context);
  return ForgetLocked(mark, lane, stream);
}

Status PeerCopies::ForgetLocked(const void* mark, const Lane& lane,
                                cuda::Stream stream) {
  Status status = OkStatus();
  while (Meeting* begun = Find(mark, lane.member)) {
    WaitForCopies(*begun, lane.member.rank, stream);
    if (Status owed = FailIfOwed(*begun, lane.member.rank); owed.failure()) {
      status = std::move(owed);
    }
    Leave(*begun, lane.member.rank);
  }
  return status;
}

Status PeerCopies::FailIfOwed(const Meeting& meeting, int rank) {
  if (RestOf(meeting, rank).is_empty()) return OkStatus();
  Status status(ErrorCode::kInternal,
                StrCat("rank ", rank,
                       ", whose program failed between a collective's "
                       "beginning and its end, came too late for copies: others wait "
                       "for it in NCCL"));
  FailLocked(status);
  return status;
}

void PeerCopies::FailUnlessDecided(const Seat& seat) {
  if (!seat.is_here || seat.is_decided()) return;
  recorder_.Finish(seat.named.ticket, FlightRecorder::State::kFailed);
}

void PeerCopies::Leave(Meeting& meeting, int rank) {
  FailUnlessDecided(meeting.seats[rank]);
  meeting.seats[rank].is_over = true;
  changed_.notify_all();
  for (const Seat& seat : meeting.seats) {
    if (!seat.is_over) return;
  }
  for (Seat& seat : meeting.seats) {
    seat.is_here = seat.is_over = seat.has_left = false;
    seat.sends = Seat::Sends::kUndecided;
  }
  const auto found = std::find_if(open_.begin(), open_.end(), [&](const auto& open) {
    return open.get() == &meeting;
  });
  spare_.push_back(std::move(*found));
  open_.erase(found);
}

void PeerCopies::Fail(const Status& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  FailLocked(reason);
}

void PeerCopies::FailLocked(const Status& reason) {
  if (failure_.success()) failure_ = reason;
  for (const auto& meeting : open_) {
    for (const Seat& seat : meeting->seats) FailUnlessDecided(seat);
  }
  changed_.notify_all();
}

}  // namespace jaxcomm
