#include "ffi/backends/nccl/peer_copies.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "ffi/backends/nccl/run_steps.h"

namespace jaxcomm {
namespace {

// How long a rank waits for another before NCCL is to do it. XLA waits ten seconds for
// the launches of all devices once one of them has failed.
constexpr double kPatienceSeconds = 2;

bool CanReach(const NcclLibrary& library, const PeerCopies::Member& from,
              const PeerCopies::Member& to) {
  int can = 0;
  if (library.cuda.DeviceCanAccessPeer(&can, from.ordinal, to.ordinal) !=
          cuda::kSuccess ||
      can == 0) {
    return false;
  }
  CurrentContext current(library.cuda, from.context);
  const cuda::Result enabled = library.cuda.CtxEnablePeerAccess(to.context, 0);
  return enabled == cuda::kSuccess || enabled == cuda::kPeerAccessAlreadyEnabled;
}

}  // namespace

const void* MarkOf(const Call& call) {
  for (size_t i = 0; i < call.site->results().size(); ++i) {
    if (call.site->results()[i].elements > 0) return call.results[i];
  }
  return nullptr;
}

Status PeerCopies::Create(const NcclLibrary& library, FlightRecorder& recorder,
                          const std::vector<Member>& members,
                          std::unique_ptr<PeerCopies>* copies) {
  std::unique_ptr<PeerCopies> made(new PeerCopies(library, recorder));
  for (const Member& from : members) {
    for (const Member& to : members) {
      if (to.group == from.group && to.ordinal != from.ordinal &&
          !CanReach(library, from, to)) {
        return OkStatus();
      }
    }
    CurrentContext current(library.cuda, from.context);
    made->lanes_.push_back(std::make_unique<Lane>(library, recorder, from));
    Lane& lane = *made->lanes_.back();
    if (Status status = library.Check(library.cuda.StreamCreateWithPriority(
                                          &lane.stream, cuda::kStreamNonBlocking, -1),
                                      "cuStreamCreateWithPriority");
        status.failure()) {
      return status;
    }
    if (Status status = lane.in_flight.Prepare(); status.failure()) return status;
  }
  *copies = std::move(made);
  return OkStatus();
}

PeerCopies::~PeerCopies() {
  for (auto* meetings : {&open_, &spare_}) {
    for (auto& meeting : *meetings) {
      for (Seat& seat : meeting->seats) {
        for (cuda::Event event : {seat.ready, seat.left}) {
          if (event != nullptr) library_.cuda.EventDestroy(event);
        }
      }
    }
  }
  for (auto& lane : lanes_) {
    CurrentContext current(library_.cuda, lane->member.context);
    lane->in_flight.Release();
    if (lane->stream != nullptr) library_.cuda.StreamDestroy(lane->stream);
  }
}

Status PeerCopies::Open(const Call& call, const Member& member, Meeting** opened) {
  for (auto& meeting : open_) {
    if (meeting->run_id == call.run_id && meeting->tag == call.tag &&
        meeting->group == member.group && !meeting->seats[member.rank].is_here) {
      *opened = meeting.get();
      return OkStatus();
    }
  }
  auto spare = std::find_if(spare_.begin(), spare_.end(), [&](const auto& meeting) {
    return meeting->group == member.group;
  });
  if (spare == spare_.end()) {
    auto made = std::make_unique<Meeting>();
    made->group = member.group;
    made->seats.resize(static_cast<size_t>(member.size));
    spare = spare_.insert(spare_.end(), std::move(made));
    for (size_t i = 0; i < lanes_.size(); ++i) {
      const Member& each = lanes_[i]->member;
      if (each.group != member.group) continue;
      Seat& seat = (*spare)->seats[each.rank];
      seat.lane = i;
      CurrentContext current(library_.cuda, each.context);
      for (cuda::Event* event : {&seat.ready, &seat.left}) {
        if (Status status = library_.Check(
                library_.cuda.EventCreate(event, cuda::kEventDisableTiming),
                "cuEventCreate");
            status.failure()) {
          return status;
        }
      }
    }
  }
  *opened = spare->get();
  (*opened)->run_id = call.run_id;
  (*opened)->tag = call.tag;
  open_.push_back(std::move(*spare));
  spare_.erase(spare);
  return OkStatus();
}

PeerCopies::Meeting* PeerCopies::Find(const void* mark, const Member& member) {
  for (size_t i = open_.size(); i-- > 0;) {
    const Seat& seat = open_[i]->seats[member.rank];
    if (open_[i]->group == member.group && seat.is_here && !seat.is_over &&
        seat.mark == mark) {
      return open_[i].get();
    }
  }
  return nullptr;
}

Status PeerCopies::Start(const Call& call, std::shared_ptr<const PeerPlan> plan,
                         size_t member, cuda::Stream ready, cuda::Stream on,
                         const InFlight::Named& named) {
  Lane& lane = *lanes_[member];
  const int rank = lane.member.rank;
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.failure()) return failure_;
  const void* const mark = MarkOf(call);
  if (Status status = ForgetLocked(mark, lane, ready); status.failure()) return status;
  Meeting* meeting = nullptr;
  if (Status status = Open(call, lane.member, &meeting); status.failure()) {
    return status;
  }
  meeting->plan = std::move(plan);
  Seat& seat = meeting->seats[rank];
  seat.is_here = true;
  seat.mark = mark;
  seat.operands.assign(call.operands, call.operands + call.site->operands().size());
  seat.results.assign(call.results, call.results + call.site->results().size());
  seat.stream = on == nullptr ? lane.stream : on;
  seat.named = named;
  if (Status gone = CheckPeers(*meeting, rank); gone.failure()) {
    Status owed = FailIfOwed(*meeting, rank);
    Leave(*meeting, rank);
    return owed.failure() ? owed : gone;
  }
  Status status =
      library_.Check(library_.cuda.EventRecord(seat.ready, ready), "cuEventRecord");
  if (status.success()) status = SendIfAllAreHere(*meeting, rank);
  for (int source : meeting->plan->parts[rank].sources) {
    if (status.success()) status = SendIfAllAreHere(*meeting, source);
  }
  if (status.failure()) {
    // Before anybody takes what was not sent for sent. Whoever is told of it gives
    // memory back that copies may be on their way to.
    FailLocked(status);
    WaitForCopies(*meeting, rank, ready);
  }
  changed_.notify_all();
  return status;
}

Status PeerCopies::SendIfAllAreHere(Meeting& meeting, int rank) {
  Seat& seat = meeting.seats[rank];
  if (!seat.is_here || seat.is_over || seat.is_decided()) return OkStatus();
  for (int target : meeting.plan->parts[rank].targets) {
    if (!meeting.seats[target].is_here || meeting.seats[target].is_over) {
      return OkStatus();
    }
  }
  Status status = Send(meeting, rank);
  if (status.success()) seat.sends = Seat::Sends::kCopied;
  return status;
}

Status PeerCopies::WaitFor(cuda::Stream stream, cuda::Event event) {
  return library_.Check(library_.cuda.StreamWaitEvent(stream, event, 0),
                        "cuStreamWaitEvent");
}

Status PeerCopies::Send(Meeting& meeting, int rank) {
  Seat& seat = meeting.seats[rank];
  const PeerPlan::Part& part = meeting.plan->parts[rank];
  Lane& lane = *lanes_[seat.lane];
  CurrentContext current(library_.cuda, lane.member.context);
  Status status = WaitFor(seat.stream, seat.ready);
  for (int target : part.targets) {
    if (status.success()) status = WaitFor(seat.stream, meeting.seats[target].ready);
  }
  lane.in_flight.Begin(seat.stream, /*may_be_captured=*/false, InFlight::Clock::now());
  for (const Step& step : part.local) {
    if (status.success()) {
      status = RunLocalStep(library_, step, seat.operands.data(), seat.results.data(),
                            seat.stream);
    }
  }
  for (const PeerPlan::Copy& copy : part.copies) {
    if (status.failure()) break;
    const char* from = static_cast<const char*>(seat.operands[copy.leaf]) + copy.from;
    char* to =
        static_cast<char*>(meeting.seats[copy.target].results[copy.leaf]) + copy.to;
    status = library_.Check(
        library_.cuda.MemcpyDtoDAsync(reinterpret_cast<cuda::Pointer>(to),
                                      reinterpret_cast<cuda::Pointer>(from), copy.bytes,
                                      seat.stream),
        "cuMemcpyDtoDAsync");
  }
  if (status.success()) {
    lane.in_flight.End(seat.stream, seat.named, InFlight::Clock::now());
  }
  // Also after a failure: some copies may be on their way.
  Status left = library_.Check(library_.cuda.EventRecord(seat.left, seat.stream),
                               "cuEventRecord");
  seat.has_left = left.success();
  return status.failure() ? status : left;
}

Status PeerCopies::WaitForCopies(const Meeting& meeting, int rank,
                                 cuda::Stream stream) {
  const Seat& own = meeting.seats[rank];
  Status status = OkStatus();
  if (own.has_left && own.stream != stream) status = WaitFor(stream, own.left);
  for (int source : meeting.plan->parts[rank].sources) {
    const Seat& seat = meeting.seats[source];
    if (seat.has_left && status.success()) status = WaitFor(stream, seat.left);
  }
  return status;
}

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
