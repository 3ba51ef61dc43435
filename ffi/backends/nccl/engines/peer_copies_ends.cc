// How a rank's part in a round ends without its Done(): its program failed in between,
// or the communicator did.
#include <utility>

#include "ffi/backends/nccl/engines/peer_copies.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

template <typename Is>
PeerCopies::Round* PeerCopies::FindBegunIf(const RankFacts& member, const Is& is) {
  const auto& open = groups_[static_cast<size_t>(member.group)].open();
  for (size_t i = open.size(); i-- > 0;) {
    const Participant& participant = open[i]->participants[member.rank];
    if (participant.is_here && !participant.is_over && is(*open[i], participant)) {
      return open[i].get();
    }
  }
  return nullptr;
}

PeerCopies::Round* PeerCopies::FindBegun(const void* mark, const RankFacts& member) {
  return FindBegunIf(member, [mark](const Round&, const Participant& participant) {
    return participant.mark == mark;
  });
}

PeerCopies::Round* PeerCopies::FindBegunBefore(int64_t run, const RankFacts& member) {
  return FindBegunIf(member, [run](const Round& round, const Participant&) {
    return round.run_id != run;
  });
}

Status PeerCopies::Forget(const void* mark, size_t member, cuda::Stream stream) {
  const Device& device = *devices_[member];
  MutexLock lock(mutex_);
  CurrentContext current(library_.cuda, device.member.context);
  return ForgetLocked(mark, device, stream);
}

Status PeerCopies::ForgetEarlierRuns(int64_t run, size_t member, cuda::Stream stream) {
  const Device& device = *devices_[member];
  Status status = OkStatus();
  MutexLock lock(mutex_);
  while (Round* begun = FindBegunBefore(run, device.member)) {
    if (Status owed = ForgetLocked(*begun, device, stream); owed.failure()) {
      status = std::move(owed);
    }
  }
  return status;
}

Status PeerCopies::ForgetLocked(const void* mark, const Device& device,
                                cuda::Stream stream) {
  Status status = OkStatus();
  while (Round* begun = FindBegun(mark, device.member)) {
    if (Status owed = ForgetLocked(*begun, device, stream); owed.failure()) {
      status = std::move(owed);
    }
  }
  return status;
}

Status PeerCopies::ForgetLocked(Round& begun, const Device& device,
                                cuda::Stream stream) {
  WaitForCopies(begun, device.member.rank, stream);
  Status owed = FailIfOwed(begun, device.member.rank);
  Leave(begun, device.member.rank);
  return owed;
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
  changed_.NotifyAll();
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
  MutexLock lock(mutex_);
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
  changed_.NotifyAll();
}

}  // namespace jaxcomm
