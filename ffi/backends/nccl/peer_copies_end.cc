// The other half of PeerCopies: how a rank's part ends, in order or not.
#include <algorithm>
#include <chrono>
#include <utility>

#include "ffi/backends/nccl/peer_copies.h"

namespace jaxcomm {

bool PeerCopies::IsDecided(const Round& round, int rank) {
  const std::vector<int>& sources = round.plan->parts[rank].sources;
  return round.participants[rank].is_decided() &&
         std::all_of(sources.begin(), sources.end(), [&](int source) {
           return round.participants[source].is_decided();
         });
}

Status PeerCopies::CheckPeers(const Round& round, int rank) {
  const PeerPlan::Part& part = round.plan->parts[rank];
  const Participant& own = round.participants[rank];
  int gone = -1;
  for (int target : part.targets) {
    if (!own.is_decided() && round.participants[target].is_over) gone = target;
  }
  for (int source : part.sources) {
    const Participant& participant = round.participants[source];
    if (!participant.is_decided() && participant.is_over) gone = source;
  }
  if (gone < 0) return OkStatus();
  return FailedPrecondition("rank ", gone,
                            ", whose program failed, went on without it");
}

PeerCopies::LeftToNccl PeerCopies::LeftOf(const Round& round, int rank) {
  const Participant& own = round.participants[rank];
  const std::vector<PeerPlan::Part>& parts = round.plan->parts;
  LeftToNccl left;
  if (own.sends == Participant::Sends::kLeftToNccl) {
    left.steps.local = parts[rank].local;
    for (const PeerPlan::Copy& copy : parts[rank].copies) {
      Step send;
      send.kind = Step::Kind::kSend;
      send.leaf = copy.leaf;
      send.from = copy.from;
      send.count = copy.bytes;
      send.peer = copy.target;
      left.steps.grouped.push_back(send);
    }
  }
  for (int source : parts[rank].sources) {
    if (round.participants[source].sends != Participant::Sends::kLeftToNccl) continue;
    for (const PeerPlan::Copy& copy : parts[source].copies) {
      if (copy.target != rank) continue;
      Step receive;
      receive.kind = Step::Kind::kRecv;
      receive.leaf = copy.leaf;
      receive.to = copy.to;
      receive.count = copy.bytes;
      receive.peer = source;
      left.steps.grouped.push_back(receive);
    }
  }
  if (left.is_empty()) return left;  // as nearly always: without allocation
  left.operands = own.operands;
  left.results = own.results;
  left.named = own.named;
  return left;
}

Status PeerCopies::Done(const void* mark, size_t member, cuda::Stream stream,
                        double patience_seconds, bool* is_begun, LeftToNccl* left) {
  Device& device = *devices_[member];
  const int rank = device.member.rank;
  std::unique_lock<std::mutex> lock(mutex_);
  Round* const round = FindBegun(mark, device.member);
  *is_begun = round != nullptr;
  if (round == nullptr) return OkStatus();
  const std::chrono::duration<double> patience(
      device.late_run == round->run_id ? 0 : patience_seconds);
  changed_.wait_for(lock, patience, [&] {
    return failure_.failure() || IsDecided(*round, rank) ||
           CheckPeers(*round, rank).failure();
  });
  CurrentContext current(library_.cuda, device.member.context);
  // Also after a failure: whoever is told of it gives the memory back.
  Status status = WaitForCopies(*round, rank, stream);
  if (failure_.failure()) return failure_;
  const Status gone = CheckPeers(*round, rank);
  if (gone.success() && !IsDecided(*round, rank)) {
    const auto leave_to_nccl = [&](int each) {
      Participant& participant = round->participants[each];
      if (!participant.is_decided())
        participant.sends = Participant::Sends::kLeftToNccl;
    };
    leave_to_nccl(rank);
    for (int source : round->plan->parts[rank].sources) leave_to_nccl(source);
    device.late_run = round->run_id;
  }
  if (gone.success()) *left = LeftOf(*round, rank);
  if (status.success() && !left->is_empty()) {
    status = WaitFor(stream, round->participants[rank].ready);
  }
  if (status.success() && gone.failure()) {
    status = FailIfOwed(*round, rank);
    if (status.success()) status = gone;
  }
  Leave(*round, rank);
  return status;
}

Status PeerCopies::Forget(const void* mark, size_t member, cuda::Stream stream) {
  const Device& device = *devices_[member];
  std::lock_guard<std::mutex> lock(mutex_);
  CurrentContext current(library_.cuda, device.member.context);
  return ForgetLocked(mark, device, stream);
}

Status PeerCopies::ForgetLocked(const void* mark, const Device& device,
                                cuda::Stream stream) {
  Status status = OkStatus();
  while (Round* begun = FindBegun(mark, device.member)) {
    WaitForCopies(*begun, device.member.rank, stream);
    if (Status owed = FailIfOwed(*begun, device.member.rank); owed.failure()) {
      status = std::move(owed);
    }
    Leave(*begun, device.member.rank);
  }
  return status;
}

Status PeerCopies::FailIfOwed(const Round& round, int rank) {
  if (LeftOf(round, rank).is_empty()) return OkStatus();
  Status status(ErrorCode::kInternal,
                StrCat("rank ", rank,
                       ", whose program failed between a collective's "
                       "beginning and its end, came too late for copies: others wait "
                       "for it in NCCL"));
  FailLocked(status);
  return status;
}

void PeerCopies::FailUnlessDecided(const Participant& participant) {
  if (!participant.is_here || participant.is_decided()) return;
  recorder_.Finish(participant.named.ticket, FlightRecorder::State::kFailed);
}

void PeerCopies::Leave(Round& round, int rank) {
  FailUnlessDecided(round.participants[rank]);
  round.participants[rank].is_over = true;
  changed_.notify_all();
  for (const Participant& participant : round.participants) {
    if (!participant.is_over) return;
  }
  for (Participant& participant : round.participants) {
    participant.is_here = participant.is_over = participant.has_left = false;
    participant.sends = Participant::Sends::kUndecided;
  }
  Rendezvous<Round>& group = groups_[static_cast<size_t>(round.group)];
  group.Keep(group.Close(&round));
}

void PeerCopies::Fail(const Status& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  FailLocked(reason);
}

void PeerCopies::FailLocked(const Status& reason) {
  if (failure_.success()) failure_ = reason;
  for (const Rendezvous<Round>& group : groups_) {
    for (const auto& round : group.open()) {
      for (const Participant& participant : round->participants) {
        FailUnlessDecided(participant);
      }
    }
  }
  changed_.notify_all();
}

}  // namespace jaxcomm
