// How a communicator's meetings go on where a group spans processes.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/host/local.h"
#include "ffi/backends/host/process_set.h"
#include "ffi/backends/host/stream_plan.h"
#include "ffi/flight/flight_dump.h"

namespace jaxcomm {
namespace {

std::string List(const std::vector<int>& numbers, const std::string& noun) {
  std::string text = noun + (numbers.size() == 1 ? " " : "s ");
  for (size_t i = 0; i < numbers.size(); ++i) {
    text += StrCat(i == 0 ? "" : ", ", numbers[i]);
  }
  return text;
}

}  // namespace

Transfer::Meeting LocalCommunicator::MeetingPlace(const Group& group, const Call& call,
                                                  const Meeting& meeting,
                                                  uint64_t step) const {
  Transfer::Meeting place;
  place.key.communicator =
      static_cast<uint64_t>(spec().key) + spec().generation * 0x9e3779b97f4a7c15;
  place.key.group = group.index * 2 + step;
  place.key.run = meeting.run;
  place.key.tag = call.shared_tag;
  place.members = group.members;
  place.signature = meeting.signature;
  place.number = static_cast<uint64_t>(meeting.sequence);
  place.call = meeting.call_site->description();
  return place;
}

void LocalCommunicator::BeginMoves(Group& group, const Call& call, Meeting* meeting,
                                   int waiting) {
  const CallSite& site = *meeting->call_site;
  const int self = spec().process_set->arena().self();
  const auto make = [&] {
    return std::make_shared<const StreamPlan>(
        MakeStreamPlan(*meeting->plan, site.results(), group.process_of, self));
  };
  if (meeting->plan == &meeting->own_plan) {
    meeting->stream = make();
  } else {
    meeting->stream = meeting->call_site->Derived<StreamPlan>(group.id, make);
  }
  const GroupBuffers buffers{meeting->operands.data(), meeting->results.data()};
  if (!meeting->stream->local_moves.empty()) {
    auto offered = RunMoves(site, *meeting->plan, meeting->stream->local_moves, buffers,
                            call.scheduler, &meeting->offer, waiting);
    if (offered != nullptr) meeting->offered.push_back(std::move(offered));
  }
  Transfer::Work work;
  work.plan = meeting->plan;
  work.stream = meeting->stream.get();
  work.leaves = &site.results();
  work.reduce = site.attributes().reduce;
  work.buffers = buffers;
  meeting->transfer.Begin(&spec().process_set->arena(),
                          MeetingPlace(group, call, *meeting, 0), work);
}

void LocalCommunicator::BeginExchange(Group& group, const Call& call,
                                      Meeting* meeting) {
  // An all-gather of the operands the planner reads, to one rank of each process.
  const CallSite& site = *meeting->call_site;
  const int size = static_cast<int>(group.devices.size());
  const size_t leaves = site.operands().size();
  meeting->exchange = std::make_unique<Exchange>();
  Exchange& exchange = *meeting->exchange;
  exchange.gathered.resize(leaves);
  exchange.results.assign(leaves, nullptr);
  exchange.operands.assign(size * leaves, nullptr);
  uint64_t seen = 0;
  for (int rank = 0; rank < size; ++rank) {
    const uint64_t process = uint64_t{1} << group.process_of[rank];
    if ((seen & process) == 0) exchange.targets.push_back(rank);
    seen |= process;
  }
  for (size_t leaf = site.plan_reads_operands_from(); leaf < leaves; ++leaf) {
    const auto bytes = static_cast<size_t>(site.operands()[leaf].bytes());
    exchange.gathered[leaf].resize(size * bytes);
    exchange.results[leaf] = exchange.gathered[leaf].data();
    for (int rank = 0; rank < size; ++rank) {
      exchange.operands[rank * leaves + leaf] =
          exchange.gathered[leaf].data() + rank * bytes;
      Move move;
      move.leaf = static_cast<int>(leaf);
      move.sources = Ranks::One(rank);
      move.targets = Ranks::Of(exchange.targets);
      move.inner = site.operands()[leaf].elements;
      move.to.offset = rank * move.inner;
      exchange.plan.moves.push_back(std::move(move));
    }
  }
  exchange.results_of.assign(size, exchange.results.data());
  for (int rank = 0; rank < size; ++rank) {
    exchange.operands_of.push_back(exchange.operands.data() + rank * leaves);
  }
  Arena& arena = spec().process_set->arena();
  exchange.stream =
      MakeStreamPlan(exchange.plan, site.operands(), group.process_of, arena.self());
  Transfer::Work work;
  work.plan = &exchange.plan;
  work.stream = &exchange.stream;
  work.leaves = &site.operands();
  work.buffers = {meeting->operands.data(), exchange.results_of.data()};
  meeting->transfer.Begin(&arena, MeetingPlace(group, call, *meeting, 1), work);
}

bool LocalCommunicator::NextTransfer(Group& group, const Call& call, Meeting* meeting,
                                     Status* status) {
  *status = meeting->transfer.status();
  if (status->failure() && meeting->transfer.failed_by_peer()) {
    *status = InOurWords(group, *meeting, *status);
  }
  if (status->failure()) DumpFlightRecords("failure of a peer");
  if (status->failure() || meeting->exchange == nullptr) return true;
  const std::unique_ptr<Exchange> exchange = std::move(meeting->exchange);
  meeting->own_plan = HostPlan();
  meeting->plan = &meeting->own_plan;
  *status = MakeHostPlan(*meeting->call_site, static_cast<int>(group.devices.size()),
                         exchange->operands_of.data(), &meeting->own_plan);
  if (status->failure()) return true;
  BeginMoves(group, call, meeting, 0);
  return false;
}

Status LocalCommunicator::InOurWords(const Group& group, const Meeting& meeting,
                                     const Status& status) const {
  const ErrorCode code = *status.errc();
  if (meeting.transfer.came_late() && code != ErrorCode::kInvalidArgument) {
    return Status(
        code, StrCat(CallerText(group, meeting),
                     " came when the others had stopped waiting: ", status.message()));
  }
  if (code == ErrorCode::kDeadlineExceeded && meeting.transfer.absent() != 0) {
    return Status(code, CrossingText(group, meeting, meeting.transfer.absent(), false));
  }
  const uint64_t gone = spec().process_set->gone() & group.members;
  if (code == ErrorCode::kAborted && gone != 0) {
    return Status(code, CrossingText(group, meeting, gone, true));
  }
  return Status(code, StrCat(CallerText(group, meeting), ": ", status.message()));
}

std::string LocalCommunicator::CallerText(const Group& group,
                                          const Meeting& meeting) const {
  const ProcessSet& set = *spec().process_set;
  return StrCat(meeting.call_site->description(), " (lane '", spec().lane,
                "', operation ", meeting.sequence, "): ", List(group.here, "rank"),
                " of ", group.devices.size(), " (", spec().platform, ":",
                group.devices[group.here[0]], group.here.size() > 1 ? " ..." : "",
                ", process ", set.peers()[set.arena().self()].process_index, ")");
}

void LocalCommunicator::Cross(Group& group, int rank, const Call& call,
                              std::unique_ptr<Meeting> meeting, int waiting) {
  Meeting* const crossing = meeting.get();
  if (call.site->plan_reads_operands()) {
    BeginExchange(group, call, crossing);
  } else {
    BeginMoves(group, call, crossing, waiting);
  }
  Status status;
  while (spec().process_set->RunBriefly(&crossing->transfer)) {
    if (!NextTransfer(group, call, crossing, &status)) continue;
    Complete(group, std::move(meeting), rank, std::move(status));
    return;
  }
  {
    std::lock_guard<std::mutex> lock(group.mutex);
    group.crossing.push_back(std::move(meeting));
  }
  Call later = call;
  later.scheduler = nullptr;  // valid in the handler only
  later.operands = nullptr;
  later.results = nullptr;
  ContinueCrossing(group, later, crossing);
}

void LocalCommunicator::ContinueCrossing(Group& group, const Call& call,
                                         Meeting* meeting) {
  PendingTransfer pending;
  pending.transfer = &meeting->transfer;
  pending.begin = meeting->first_arrival;
  pending.timeout_seconds = spec().timeout_seconds;
  pending.owner = id_;
  pending.describe = [this, &group, meeting](uint64_t processes, bool died) {
    return CrossingText(group, *meeting, processes, died);
  };
  // Keeps the communicator, were it closed meanwhile.
  pending.done = [self =
                      std::static_pointer_cast<LocalCommunicator>(shared_from_this()),
                  &group, call, meeting] {
    Status status;
    if (!self->NextTransfer(group, call, meeting, &status)) {
      self->ContinueCrossing(group, call, meeting);
      return;
    }
    std::unique_ptr<Meeting> over;
    {
      std::lock_guard<std::mutex> lock(group.mutex);
      auto it = std::find_if(group.crossing.begin(), group.crossing.end(),
                             [&](const auto& known) { return known.get() == meeting; });
      over = std::move(*it);
      group.crossing.erase(it);
    }
    self->Complete(group, std::move(over), -1, std::move(status));
  };
  spec().process_set->Continue(std::move(pending));
  // Whoever closes says so in the group first, and then ends what the process set has:
  // had it not had this one yet, it is said by now.
  Status closed;
  {
    std::lock_guard<std::mutex> lock(group.mutex);
    closed = group.closed;
  }
  if (closed.failure()) spec().process_set->Abort(id_, closed);
}

std::string LocalCommunicator::CrossingText(const Group& group, const Meeting& meeting,
                                            uint64_t processes, bool gone) const {
  const ProcessSet& set = *spec().process_set;
  const auto name = [&](int process) {
    return StrCat("process ", set.peers()[process].process_index);
  };
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(group.process_of.size()); ++rank) {
    if ((processes >> group.process_of[rank]) & 1) ranks.push_back(rank);
  }
  std::string text = CallerText(group, meeting);
  if (gone) {
    text += StrCat(" waited for ", List(ranks, "rank"), ", gone with");
  } else {
    const double waited = std::chrono::duration<double>(
                              std::chrono::steady_clock::now() - meeting.first_arrival)
                              .count();
    text += StrCat(" waited ", std::llround(waited * 10) / 10.0, " s for ");
    text += ranks.empty() ? "bytes that are on their way" : List(ranks, "rank");
    text += ".";
  }
  for (uint64_t mask = processes; mask != 0; mask &= mask - 1) {
    const int process = __builtin_ctzll(mask);
    const ProcessState& state = set.arena().process(process);
    const bool left =
        state.presence.load(std::memory_order_acquire) == ProcessState::kLeft;
    if (gone) {
      text += StrCat(" ", name(process), " (pid ", set.peers()[process].pid,
                     "), which ", left ? "called finalize or exited" : "died", ".");
    }
    if (left) continue;
    const std::vector<std::string> calls = set.arena().CallsOf(process);
    const std::string last = state.last.Load();
    std::string who = name(process);
    who[0] = 'P';
    if (!gone && !calls.empty()) {
      text += StrCat(" ", who, " waits in ", calls.front(), " instead.");
    } else if (!last.empty()) {
      text += StrCat(" ", who, " was last in ", last, ", operation ",
                     state.last_number.load(std::memory_order_relaxed), ".");
    } else {
      text += StrCat(" ", who, " has called nothing yet.");
    }
  }
  if (gone) {
    // What JAX does, not we: its coordination service runs in process 0.
    const bool coordinator_gone =
        std::any_of(ranks.begin(), ranks.end(), [&](int rank) {
          return set.peers()[group.process_of[rank]].process_index == 0;
        });
    return text +
           (coordinator_gone
                ? " Process 0 runs JAX's coordination service: without it JAX "
                  "ends this process too."
                : " Call jaxcomm.finalize() and go on with a mesh of the devices "
                  "that remain. JAX ends this process once it misses the other's "
                  "heartbeats, unless jax_enable_recoverability is set.");
  }
  return text +
         " They may have stopped or run a different program; see JAXCOMM_TIMEOUT. "
         "Before "
         "the next program call jaxcomm.finalize() in every process: they may be out "
         "of "
         "step.";
}

}  // namespace jaxcomm
