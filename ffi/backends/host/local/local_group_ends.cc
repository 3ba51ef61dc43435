// How the rounds of a group end before all have come: failures, timeouts, interrupts.
#include <set>
#include <utility>

#include "ffi/backends/host/arena/process_set.h"
#include "ffi/backends/host/local/local_group.h"
#include "ffi/flight/flight_dump.h"

namespace jaxcomm {

void LocalGroup::Fail(LocalRound* round, const LocalFailure& failure,
                      Continuations* out) {
  for (int rank : members_.here) {
    if (!round->IsWaiting(rank)) continue;
    CompleteParticipant(round->participants[rank], failure.For(rank), out);
  }
  RefuseRun(round->run_id, failure.to_all);
  Recycle(rounds_.Close(round));
}

void LocalGroup::RefuseRun(int64_t run_id, const Status& reason) {
  if (rounds_.Refuse(run_id, reason)) refused_runs_.emplace_back(run_id, reason);
}

void LocalGroup::EndRefusedRuns() {
  std::vector<std::pair<int64_t, Status>> runs;
  {
    MutexLock lock(mutex_);
    runs.swap(refused_runs_);
  }
  for (const auto& [run_id, reason] : runs) context_.end_run(run_id, reason);
}

bool LocalGroup::HasTimedOut(const LocalRound& round, Clock::time_point now) const {
  if (round.interrupted_at && now - *round.interrupted_at > kAfterInterrupt)
    return true;
  return now - round.waiting_since >
         std::chrono::duration<double>(context_.spec.timeout_seconds);
}

void LocalGroup::Interrupt(Clock::time_point now) {
  MutexLock lock(mutex_);
  for (const auto& round : rounds_.open()) {
    if (round->HasWaiting() && !round->interrupted_at) round->interrupted_at = now;
  }
}

// Where nobody waits, nothing has failed: the ranks that came have their results, and
// the missing ones need only each other. If they come later, they open another round.
bool LocalGroup::ForgetTimedOut(Clock::time_point now) {
  std::vector<LocalRound*> forgotten;
  bool any_waits = false;
  for (const auto& round : rounds_.open()) {
    if (!HasTimedOut(*round, now)) continue;
    if (round->HasWaiting()) {
      any_waits = true;
    } else if (round->moving == 0) {
      forgotten.push_back(round.get());
    }
  }
  for (LocalRound* round : forgotten) Recycle(rounds_.Close(round));
  return any_waits;
}

void LocalGroup::Expire(Clock::time_point now) {
  {
    MutexLock lock(mutex_);
    if (!ForgetTimedOut(now)) return;
  }
  // Before any rank is told, and outside the lock: it writes a file.
  DumpFlightRecords("timeout");
  Continuations failures;
  {
    MutexLock lock(mutex_);
    std::set<int64_t> failing_runs;
    for (const auto& round : rounds_.open()) {
      if (HasTimedOut(*round, now) && round->HasWaiting()) {
        failing_runs.insert(round->run_id);
      }
    }
    // A run that fails in one place fails in all: ranks that wait for each other in two
    // places are told together. The texts name other rounds, so they come first.
    std::vector<std::pair<LocalRound*, LocalFailure>> expired;
    for (const auto& round : rounds_.open()) {
      if (round->moving == 0 && failing_runs.count(round->run_id) > 0) {
        expired.emplace_back(round.get(), timeout_.FailureOf(*round));
      }
    }
    for (const auto& [round, failure] : expired) Fail(round, failure, &failures);
  }
  EndRefusedRuns();
  Continue(std::move(failures));
}

void LocalGroup::Abort(const Status& reason) {
  carrier_.Close(reason);
  Continuations failures;
  {
    MutexLock lock(mutex_);
    if (closed_.success()) closed_ = reason;
    FailIdle(reason, &failures, [](const LocalRound&) { return true; });
  }
  EndRefusedRuns();
  Continue(std::move(failures));
}

void LocalGroup::EndRun(int64_t run_id, const Status& reason) {
  Continuations failures;
  {
    MutexLock lock(mutex_);
    if (!rounds_.Refuse(run_id, reason)) return;
    FailIdle(reason, &failures,
             [&](const LocalRound& round) { return round.run_id == run_id; });
  }
  Continue(std::move(failures));
}

template <typename Predicate>
void LocalGroup::FailIdle(const Status& reason, Continuations* out,
                          const Predicate& fails) {
  std::vector<LocalRound*> idle;
  for (const auto& round : rounds_.open()) {
    // The ranks of the others complete by themselves: the last to move fails the rest.
    if (round->moving == 0 && fails(*round)) idle.push_back(round.get());
  }
  for (LocalRound* round : idle) Fail(round, {reason, {}}, out);
}

}  // namespace jaxcomm
