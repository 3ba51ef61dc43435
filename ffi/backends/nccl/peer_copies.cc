#include "ffi/backends/nccl/peer_copies.h"

#include <algorithm>
#include <utility>

#include "ffi/backends/nccl/run_steps.h"

namespace jaxcomm {

const void* MarkOf(const Call& call) {
  for (size_t i = 0; i < call.site->results().size(); ++i) {
    if (call.site->results()[i].elements > 0) return call.results[i];
  }
  return nullptr;
}

Status PeerCopies::Create(const NcclLibrary& library, FlightRecorder& recorder,
                          const std::vector<Member>& members,
                          std::unique_ptr<PeerCopies>* copies) {
  if (!CanReachPeers(library, members)) return OkStatus();
  std::unique_ptr<PeerCopies> made(new PeerCopies(library, recorder));
  for (const Member& member : members) {
    CurrentContext current(library.cuda, member.context);
    made->lanes_.push_back(std::make_unique<Lane>(library, recorder, member));
    Lane& lane = *made->lanes_.back();
    RETURN_IF_ERROR(library.Check(library.cuda.StreamCreateWithPriority(
                                      &lane.stream, cuda::kStreamNonBlocking, -1),
                                  "cuStreamCreateWithPriority"));
    RETURN_IF_ERROR(lane.in_flight.Prepare());
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
        RETURN_IF_ERROR(
            library_.Check(library_.cuda.EventCreate(event, cuda::kEventDisableTiming),
                           "cuEventCreate"));
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
  RETURN_IF_ERROR(ForgetLocked(mark, lane, ready));
  Meeting* meeting = nullptr;
  RETURN_IF_ERROR(Open(call, lane.member, &meeting));
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

}  // namespace jaxcomm
