#include "ffi/backends/host/local/local_group.h"

#include <algorithm>
#include <utility>

#include "ffi/backends/host/arena/process_set.h"
#include "ffi/backends/host/local/local_wait.h"
#include "ffi/backends/host/reduce/execute.h"
#include "ffi/os/cores.h"

namespace jaxcomm {

namespace ffi = xla::ffi;

LocalGroup::LocalGroup(const HostContext& context, GroupMembers members)
    : context_(context),
      members_(std::move(members)),
      carrier_(context, members_,
               [this](std::unique_ptr<LocalRound> round, int rank, Status status) {
                 Complete(std::move(round), rank, std::move(status));
               }),
      timeout_(context.spec, members_, rounds_),
      calls_(Plan::kKinds, 0) {}

ffi::Future LocalGroup::Execute(int rank, const Call& call) {
  const FlightRecorder::Ticket ticket =
      context_.recorder.Start(call.site->operation(), call.run_id, call.shared_tag,
                              static_cast<int>(members_.index), rank);
  ffi::Promise promise;
  ffi::Future future(promise);
  Continuations mine;
  std::unique_ptr<LocalRound> complete;
  int helpers = 0;
  {
    MutexLock lock(mutex_);
    auto joined = Join(rank, call);
    if (joined.has_error()) {
      RecordOutcome(ticket, joined.error());
      RefuseRun(call.run_id, joined.error());
      mine.push_back({std::move(promise), std::move(joined.error())});
    } else {
      LocalRound* const round = *joined;
      Enter(rank, call, ticket, std::move(promise), round);
      if (IsPairwise(*round)) {
        MovePairs(rank, call, round, &mine);
      } else if (round->come < static_cast<int>(members_.here.size())) {
        WaitBriefly(rank, round, &mine);
      } else {
        complete = rounds_.Close(round);
        ++calls_[static_cast<int>(call.site->kind())];
        helpers = round->in_handlers;
      }
    }
  }
  if (complete != nullptr) MoveAll(rank, call, std::move(complete), helpers);
  EndRefusedRuns();
  for (Continuation& each : mine) CompleteHere(std::move(each));
  return future;
}

ErrorOr<LocalRound*> LocalGroup::Join(int rank, const Call& call) {
  RETURN_IF_ERROR(closed_);
  RETURN_IF_ERROR(rounds_.Refusal(call.run_id));
  LocalRound* const round = rounds_.Find(call.run_id, call.tag, rank);
  if (round != nullptr) return round;
  std::unique_ptr<LocalRound> opened = rounds_.TakeSpare();
  if (opened == nullptr) opened = std::make_unique<LocalRound>(members_.devices.size());
  if (Status status = Prepare(call, opened.get()); status.failure()) {
    rounds_.Keep(std::move(opened));
    return status;
  }
  return rounds_.Open(std::move(opened), call.run_id, call.tag);
}

Status LocalGroup::Prepare(const Call& call, LocalRound* round) {
  round->Reset(call.site, ++opened_);
  if (members_.spans_processes()) {
    round->run = runs_.NumberOf(call.site->program_tag(), call.run_id);
  }
  if (call.site->plan_reads_operands()) return OkStatus();  // once they are there
  ASSIGN_OR_RETURN(round->plan, plans_.Find(*call.site, [&] {
    return MakeHostPlan(*call.site, members_.size(), /*operands_of=*/nullptr);
  }));
  if (!IsPairwise(*round)) return OkStatus();
  const HostPlan& plan = *round->plan;
  round->ranks_missing.resize(plan.moves.size());
  for (int rank = 0; rank < members_.size(); ++rank) {
    round->participants[rank].moves_left = static_cast<int>(plan.moves_of[rank].size());
    for (int index : plan.moves_of[rank]) ++round->ranks_missing[index];
  }
  return OkStatus();
}

bool LocalGroup::IsPairwise(const LocalRound& round) const {
  return round.plan != nullptr && round.plan->pairwise && !members_.spans_processes();
}

void LocalGroup::Enter(int rank, const Call& call, FlightRecorder::Ticket ticket,
                       ffi::Promise promise, LocalRound* round) {
  if (members_.spans_processes()) {
    context_.recorder.SetRun(ticket, static_cast<int64_t>(round->run));
  }
  // The ranks that are done waited for none of the missing ones. So the time of the
  // missing ones begins with the first of them.
  if (round->come > 0 && !round->HasWaiting()) round->waiting_since = Clock::now();
  LocalParticipant& participant = round->participants[rank];
  participant.state = LocalParticipant::kWaiting;
  participant.ticket = ticket;
  participant.operands.assign(call.operands,
                              call.operands + call.site->operands().size());
  participant.results.assign(call.results, call.results + call.site->results().size());
  participant.promise.push_back(std::move(promise));
  round->operands[rank] = participant.operands.data();
  round->results[rank] = participant.results.data();
  ++round->come;
  bytes_ += call.site->operand_bytes();
}

void LocalGroup::MoveAll(int rank, const Call& call, std::unique_ptr<LocalRound> round,
                         int helpers) {
  if (members_.spans_processes()) {
    carrier_.Carry(rank, call, std::move(round), helpers);
    return;
  }
  Status status;
  if (call.site->plan_reads_operands()) {
    auto made = MakeHostPlan(*call.site, members_.size(), round->operands.data());
    status = made.status();
    if (made) round->own_plan = std::move(*made);
    round->plan = &round->own_plan;
  }
  if (status.success()) {
    auto offered = RunMoves(round->moves(), round->plan->all_moves, call.scheduler,
                            &round->offer, helpers);
    if (offered != nullptr) round->offered.push_back(std::move(offered));
  }
  Complete(std::move(round), rank, std::move(status));
}

void LocalGroup::MovePairs(int rank, const Call& call, LocalRound* round,
                           Continuations* mine) {
  const HostPlan& plan = *round->plan;
  std::vector<int> ready;
  for (int index : plan.moves_of[rank]) {
    if (--round->ranks_missing[index] == 0) ready.push_back(index);
  }
  Continuations others;
  const auto finish = [&](int done) REQUIRES(mutex_) {
    LocalParticipant& participant = round->participants[done];
    if (!round->IsWaiting(done) || participant.moves_left > 0) return;
    participant.state = LocalParticipant::kDone;
    --round->unfinished;
    CompleteParticipant(participant, OkStatus(), done == rank ? mine : &others);
  };
  if (!ready.empty()) {
    ++round->moving;  // keeps a timeout from pulling the buffers away
    const int helpers = round->in_handlers;
    // With more ranks than cores the other cores are busy with moves of their own.
    Scheduler* const scheduler = members_.size() > Cores() ? nullptr : call.scheduler;
    mutex_.unlock();
    auto offered = RunMoves(round->moves(), ready, scheduler, &round->offer, helpers);
    mutex_.lock();
    if (offered != nullptr) round->offered.push_back(std::move(offered));
    --round->moving;
    for (int index : ready) {
      const std::vector<int> involved = plan.moves[index].Involved();
      for (int other : involved) --round->participants[other].moves_left;
      for (int other : involved) finish(other);
    }
  }
  finish(rank);  // a rank that neither sends nor receives
  bool waits = round->IsWaiting(rank);
  Status refusal = closed_.failure() ? closed_ : rounds_.Refusal(round->run_id);
  if (refusal.failure() && round->moving == 0 && round->unfinished > 0) {
    // Closed while bytes moved, or the run failed: the missing ranks will be refused.
    Fail(round, {std::move(refusal), {}}, &others);
    waits = false;
  } else if (round->unfinished == 0) {
    ++calls_[static_cast<int>(call.site->kind())];
    Recycle(rounds_.Close(round));
  }
  Continue(std::move(others), call.site->pace());
  if (waits) WaitBriefly(rank, round, mine);
}

void LocalGroup::Complete(std::unique_ptr<LocalRound> round, int rank, Status status) {
  const std::shared_ptr<Pace> pace = round->call_site->pace();
  Continuations mine, others;
  others.reserve(members_.here.size());
  {
    MutexLock lock(mutex_);
    for (int other : members_.here) {
      CompleteParticipant(round->participants[other], status,
                          other == rank ? &mine : &others);
    }
    if (status.failure()) RefuseRun(round->run_id, status);
    Recycle(std::move(round));
  }
  EndRefusedRuns();
  Continue(std::move(others), pace);
  for (Continuation& each : mine) CompleteHere(std::move(each));
}

void LocalGroup::WaitBriefly(int rank, LocalRound* round, Continuations* mine) {
  LocalParticipant& participant = round->participants[rank];
  if (!ShouldSpin(*round, static_cast<int>(members_.here.size()))) return;
  participant.is_in_handler = true;
  ++round->in_handlers;
  mutex_.unlock();
  SpinAndHelp(participant, round->offer);
  mutex_.lock();
  --round->in_handlers;
  participant.is_in_handler = false;
  if (!participant.is_complete.load(std::memory_order_relaxed)) return;
  mine->push_back(
      {std::move(participant.promise.front()), std::move(participant.status)});
  participant.promise.clear();
  if (round->in_handlers > 0) return;
  const auto over = std::find_if(lingering_.begin(), lingering_.end(),
                                 [&](const auto& each) { return each.get() == round; });
  if (over == lingering_.end()) return;
  rounds_.Keep(std::move(*over));
  lingering_.erase(over);
}

void LocalGroup::CompleteParticipant(LocalParticipant& participant, Status status,
                                     Continuations* out) {
  RecordOutcome(participant.ticket, status);
  if (!participant.is_in_handler) {
    out->push_back({std::move(participant.promise.front()), std::move(status)});
    participant.promise.clear();
    return;
  }
  participant.status = std::move(status);
  participant.is_complete.store(true, std::memory_order_release);
}

void LocalGroup::Recycle(std::unique_ptr<LocalRound> round) {
  if (round->in_handlers > 0) {
    lingering_.push_back(std::move(round));
  } else {
    rounds_.Keep(std::move(round));
  }
}

void LocalGroup::RecordOutcome(FlightRecorder::Ticket ticket, const Status& status) {
  context_.recorder.Finish(ticket, status.success() ? FlightRecorder::State::kCompleted
                                                    : FlightRecorder::State::kFailed);
}

void LocalGroup::AddFailedRuns(std::vector<int64_t>* runs) const {
  MutexLock lock(mutex_);
  for (int64_t run : rounds_.RefusedRuns()) runs->push_back(run);
  // Some of their ranks were moving bytes when this was closed.
  for (const auto& round : rounds_.open()) {
    const bool is_whole = round->come == static_cast<int>(members_.here.size());
    if (!is_whole) runs->push_back(round->run_id);
  }
}

void LocalGroup::AddStats(CommunicatorStats* stats, std::vector<int64_t>* calls) const {
  const int64_t on_their_way = carrier_.pending();
  MutexLock lock(mutex_);
  const size_t rounds = rounds_.open().size() + rounds_.spare().size();
  stats->bytes += bytes_;
  stats->in_flight += static_cast<int64_t>(rounds_.open().size()) + on_their_way;
  stats->host_bytes += static_cast<int64_t>(
      sizeof(*this) + rounds * (sizeof(LocalRound) +
                                members_.devices.size() * sizeof(LocalParticipant)));
  for (int i = 0; i < Plan::kKinds; ++i) {
    (*calls)[i] = std::max((*calls)[i], calls_[i]);
  }
}

std::string LocalGroup::Notice(Clock::time_point now, double seconds) const {
  MutexLock lock(mutex_);
  for (const auto& round : rounds_.open()) {
    const double waited =
        std::chrono::duration<double>(now - round->waiting_since).count();
    if (waited > seconds && timeout_.LacksRanks(*round)) {
      return timeout_.NoticeOf(*round, waited);
    }
  }
  return "";
}

}  // namespace jaxcomm
