#include "ffi/backends/nccl/engines/peer_copies.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "ffi/backends/nccl/library/primary_contexts.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

const void* MarkOf(const Call& call) {
  for (size_t i = 0; i < call.site->results().size(); ++i) {
    if (call.site->results()[i].elements > 0) return call.results[i];
  }
  return nullptr;
}

ErrorOr<std::unique_ptr<PeerCopies>> PeerCopies::Create(
    const NcclLibrary& library, FlightRecorder& recorder,
    const std::vector<RankFacts>& members) {
  std::unique_ptr<PeerCopies> made(new PeerCopies(library, recorder));
  MutexLock lock(made->mutex_);
  for (const RankFacts& member : members) {
    CurrentContext current(library.cuda, member.context);
    made->devices_.push_back(std::make_unique<Device>(library, recorder, member));
    Device& device = *made->devices_.back();
    std::vector<RankFacts> group;
    std::copy_if(members.begin(), members.end(), std::back_inserter(group),
                 [&](const RankFacts& each) { return each.group == member.group; });
    device.takes_part = CanReachPeers(library, group);
    RETURN_IF_ERROR(library.Try(library.cuda.StreamCreateWithPriority, &device.stream,
                                cuda::kStreamNonBlocking, -1));
    RETURN_IF_ERROR(device.in_flight.Prepare());
    const auto groups = static_cast<size_t>(member.group) + 1;
    if (made->groups_.size() < groups) made->groups_.resize(groups);
  }
  const auto takes_part = [](const auto& device) { return device->takes_part; };
  if (std::none_of(made->devices_.begin(), made->devices_.end(), takes_part)) {
    return nullptr;
  }
  return made;
}

void PeerCopies::DestroyEvents(const Round& round) {
  for (const Participant& participant : round.participants) {
    for (cuda::Event event : {participant.ready, participant.left, participant.stays}) {
      if (event != nullptr) library_.cuda.EventDestroy(event);
    }
  }
}

PeerCopies::~PeerCopies() {
  for (const Rendezvous<Round>& group : groups_) {
    for (const auto* rounds : {&group.open(), &group.spare()}) {
      for (const auto& round : *rounds) DestroyEvents(*round);
    }
  }
  for (auto& device : devices_) {
    CurrentContext current(library_.cuda, device->member.context);
    device->in_flight.Release();
    if (device->stream != nullptr) library_.cuda.StreamDestroy(device->stream);
  }
}

ErrorOr<PeerCopies::Round*> PeerCopies::Join(const Call& call,
                                             const RankFacts& member) {
  Rendezvous<Round>& group = groups_[static_cast<size_t>(member.group)];
  Round* const joined = group.Find(call.run_id, call.tag, member.rank);
  if (joined != nullptr) return joined;
  std::unique_ptr<Round> round = group.TakeSpare();
  if (round == nullptr) {
    ASSIGN_OR_RETURN(round, MakeRound(member));
  }
  return group.Open(std::move(round), call.run_id, call.tag);
}

ErrorOr<std::unique_ptr<PeerCopies::Round>> PeerCopies::MakeRound(
    const RankFacts& member) {
  auto made = std::make_unique<Round>();
  made->group = member.group;
  made->participants.resize(static_cast<size_t>(member.size));
  Status status;
  for (size_t i = 0; i < devices_.size(); ++i) {
    const RankFacts& each = devices_[i]->member;
    if (each.group != member.group) continue;
    Participant& participant = made->participants[each.rank];
    participant.device = i;
    CurrentContext current(library_.cuda, each.context);
    for (cuda::Event* event :
         {&participant.ready, &participant.left, &participant.stays}) {
      if (status.failure()) break;
      status =
          library_.Try(library_.cuda.EventCreate, event, cuda::kEventDisableTiming);
    }
  }
  if (status.failure()) {
    DestroyEvents(*made);
    return status;
  }
  return made;
}

Status PeerCopies::Start(const Call& call, std::shared_ptr<const PeerPlan> plan,
                         size_t member, cuda::Stream ready, cuda::Stream on,
                         const InFlight::Named& named) {
  Device& device = *devices_[member];
  const int rank = device.member.rank;
  MutexLock lock(mutex_);
  if (failure_.failure()) return failure_;
  const void* const mark = MarkOf(call);
  RETURN_IF_ERROR(ForgetLocked(mark, device, ready));
  ASSIGN_OR_RETURN(Round* const round, Join(call, device.member));
  round->plan = std::move(plan);
  Participant& participant = round->participants[rank];
  participant.is_here = true;
  participant.mark = mark;
  participant.operands.assign(call.operands,
                              call.operands + call.site->operands().size());
  participant.results.assign(call.results, call.results + call.site->results().size());
  participant.stream = on == nullptr ? device.stream : on;
  participant.named = named;
  if (Status gone = CheckPeers(*round, rank); gone.failure()) {
    Status owed = FailIfOwed(*round, rank);
    Leave(*round, rank);
    return owed.failure() ? owed : gone;
  }
  Status status = library_.Try(library_.cuda.EventRecord, participant.ready, ready);
  if (status.success()) status = SendIfAllAreHere(*round, rank);
  for (int source : round->plan->parts[rank].sources) {
    if (status.success()) status = SendIfAllAreHere(*round, source);
  }
  if (status.failure()) {
    // Before anybody takes what was not sent for sent. Whoever is told of it gives
    // memory back that copies may be on their way to.
    FailLocked(status);
    WaitForCopies(*round, rank, ready);
  }
  changed_.NotifyAll();
  return status;
}

Status PeerCopies::SendIfAllAreHere(Round& round, int rank) {
  Participant& participant = round.participants[rank];
  if (!participant.is_here || participant.is_over || participant.is_decided())
    return OkStatus();
  for (int target : round.plan->parts[rank].targets) {
    if (!round.participants[target].is_here || round.participants[target].is_over) {
      return OkStatus();
    }
  }
  Status status = Send(round, rank);
  if (status.success()) participant.sends = Participant::Sends::kCopied;
  return status;
}

Status PeerCopies::WaitFor(cuda::Stream stream, cuda::Event event) {
  return library_.Try(library_.cuda.StreamWaitEvent, stream, event, 0);
}

Status PeerCopies::Send(Round& round, int rank) {
  Participant& participant = round.participants[rank];
  const PeerPlan::Part& part = round.plan->parts[rank];
  Device& device = *devices_[participant.device];
  CurrentContext current(library_.cuda, device.member.context);
  Status status = WaitFor(participant.stream, participant.ready);
  for (int target : part.targets) {
    if (status.success())
      status = WaitFor(participant.stream, round.participants[target].ready);
  }
  if (status.success()) {
    status = device.in_flight.Begin(participant.stream, /*may_be_captured=*/false,
                                    InFlight::Clock::now());
  }
  const bool is_beside = !part.local.empty() && device.stream != participant.stream;
  if (is_beside && status.success()) status = WaitFor(device.stream, participant.ready);
  const auto copy_local = [&] {
    for (const Step& step : part.local) {
      if (status.failure()) return;
      status = RunLocalStep(library_, step, participant.operands.data(),
                            participant.results.data(), device.stream);
    }
  };
  if (is_beside) copy_local();
  for (const Step& copy : part.copies) {
    if (status.failure()) break;
    const char* from =
        static_cast<const char*>(participant.operands[copy.leaf]) + copy.from;
    char* to =
        static_cast<char*>(round.participants[copy.peer].results[copy.leaf]) + copy.to;
    status = CopyRows(library_, copy, reinterpret_cast<cuda::Pointer>(to),
                      reinterpret_cast<cuda::Pointer>(from), participant.stream);
  }
  // Last: a copy within a GPU is a kernel, which waits for the work beside a start.
  if (!is_beside) copy_local();
  // Also after a failure: some copies may be on their way.
  if (is_beside) {
    Status stays =
        library_.Try(library_.cuda.EventRecord, participant.stays, device.stream);
    if (stays.success()) stays = WaitFor(participant.stream, participant.stays);
    if (status.success()) status = std::move(stays);
  }
  if (status.success()) {
    status = device.in_flight.End(participant.stream, participant.named,
                                  InFlight::Clock::now());
  }
  Status left =
      library_.Try(library_.cuda.EventRecord, participant.left, participant.stream);
  participant.has_left = left.success();
  return status.failure() ? status : left;
}

Status PeerCopies::WaitForCopies(const Round& round, int rank, cuda::Stream stream) {
  const Participant& own = round.participants[rank];
  Status status = OkStatus();
  if (own.has_left && own.stream != stream) status = WaitFor(stream, own.left);
  for (int source : round.plan->parts[rank].sources) {
    const Participant& participant = round.participants[source];
    if (participant.has_left && status.success())
      status = WaitFor(stream, participant.left);
  }
  return status;
}

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
    left.steps.grouped = parts[rank].copies;
  }
  for (int source : parts[rank].sources) {
    if (round.participants[source].sends != Participant::Sends::kLeftToNccl) continue;
    for (const Step& copy : parts[source].copies) {
      if (copy.peer != rank) continue;
      Step receive = copy;
      receive.kind = Step::Kind::kRecv;
      receive.peer = source;
      left.steps.grouped.push_back(receive);
    }
  }
  if (left.is_empty()) return left;  // as nearly always: without allocation
  left.steps = ForNccl(std::move(left.steps), round.plan->leaves);
  left.operands = own.operands;
  left.results = own.results;
  left.named = own.named;
  return left;
}

Status PeerCopies::Done(const void* mark, size_t member, cuda::Stream stream,
                        double patience_seconds, bool* is_begun, LeftToNccl* left) {
  Device& device = *devices_[member];
  const int rank = device.member.rank;
  MutexLock lock(mutex_);
  Round* const round = FindBegun(mark, device.member);
  *is_begun = round != nullptr;
  if (round == nullptr) return OkStatus();
  const std::chrono::duration<double> patience(
      device.late_run == round->run_id ? 0 : patience_seconds);
  changed_.WaitFor(mutex_, patience, [&]() REQUIRES(mutex_) {
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

}  // namespace jaxcomm
