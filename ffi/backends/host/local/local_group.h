// The ranks of this process in one group of a communicator: where they meet, and how
// their collectives are carried out, fail and time out.
//
// The last rank to come, or the later one of a pair, moves the bytes straight from
// operand to result; nobody waits on a thread for long.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_GROUP_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_GROUP_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/backends/host/local/continuer.h"
#include "ffi/backends/host/local/group_members.h"
#include "ffi/backends/host/local/local_round.h"
#include "ffi/backends/host/local/local_timeout.h"
#include "ffi/backends/host/local/round_carrier.h"
#include "ffi/core/communicator.h"
#include "ffi/core/derived_cache.h"
#include "ffi/core/rendezvous.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

// The runs of programs that came to a group, numbered from the making of the
// communicator. Between processes XLA's run ids do not serve: they depend on where the
// source file lies, and stay apart for good once one process ran alone. Not
// thread-safe: the owner has a lock.
class RunNumbers {
 public:
  // How many runs of the program came before this one, and itself.
  uint64_t NumberOf(uint64_t program, int64_t run_id) {
    Runs& runs = runs_[program];
    for (auto it = runs.recent.rbegin(); it != runs.recent.rend(); ++it) {
      if (it->first == run_id) return it->second;
    }
    runs.recent.emplace_back(run_id, ++runs.count);
    if (runs.recent.size() > kRecentRuns) runs.recent.pop_front();
    return runs.count;
  }

 private:
  // Runs of one program that may be under way at a time.
  static constexpr size_t kRecentRuns = 64;

  struct Runs {
    uint64_t count = 0;
    std::deque<std::pair<int64_t, uint64_t>> recent;  // run id, number
  };

  std::unordered_map<uint64_t, Runs> runs_;
};

class LocalGroup {
 public:
  using Clock = LocalRound::Clock;

  LocalGroup(const HostContext& context, GroupMembers members);

  const GroupMembers& members() const { return members_; }

  // See Communicator.
  xla::ffi::Future Execute(int rank, const Call& call);
  void Abort(const Status& reason);
  void EndRun(int64_t run_id, const Status& reason);
  void Interrupt(Clock::time_point now);
  void AddFailedRuns(std::vector<int64_t>* runs) const;
  // `calls`: by collective.
  void AddStats(CommunicatorStats* stats, std::vector<int64_t>* calls) const;

  // Fails the rounds in which a rank waits that had timed out by `now`.
  void Expire(Clock::time_point now);
  // The notice about a round that has waited for more than `seconds` for ranks of this
  // process. Empty if there is none.
  std::string Notice(Clock::time_point now, double seconds) const;

 private:
  using Continuations = std::vector<Continuation>;

  // The round that a rank comes to. Fails if the rank is refused.
  ErrorOr<LocalRound*> Join(int rank, const Call& call) REQUIRES(mutex_);
  Status Prepare(const Call& call, LocalRound* round) REQUIRES(mutex_);
  void Enter(int rank, const Call& call, FlightRecorder::Ticket ticket,
             xla::ffi::Promise promise, LocalRound* round) REQUIRES(mutex_);
  bool IsPairwise(const LocalRound& round) const;

  // Moves between the rank and those of its pairs that are there. Hands the promise of
  // the rank, if that is all, to `mine`. Unlocks meanwhile.
  void MovePairs(int rank, const Call& call, LocalRound* round, Continuations* mine)
      REQUIRES(mutex_);
  // Carries out a round to which all have come, as its last rank.
  void MoveAll(int rank, const Call& call, std::unique_ptr<LocalRound> round,
               int helpers) EXCLUDES(mutex_);
  // Ends a round that is closed. `rank`: whose handler this is, or -1.
  void Complete(std::unique_ptr<LocalRound> round, int rank, Status status)
      EXCLUDES(mutex_);
  // Waits in the handler for a moment, where that is worth the thread. If the round
  // ends meanwhile, hands the rank's promise to `mine`. Unlocks meanwhile.
  void WaitBriefly(int rank, LocalRound* round, Continuations* mine) REQUIRES(mutex_);

  // Ends a rank's wait: hands its promise to `out`, or lets it leave its handler.
  void CompleteParticipant(LocalParticipant& participant, Status status,
                           Continuations* out) REQUIRES(mutex_);
  // Fails the ranks that wait in an open round, and the ranks of its run that come
  // later. The caller then calls EndRefusedRuns().
  void Fail(LocalRound* round, const LocalFailure& failure, Continuations* out)
      REQUIRES(mutex_);
  // Likewise all open rounds that `fails` says, but where bytes move.
  template <typename Predicate>
  void FailIdle(const Status& reason, Continuations* out, const Predicate& fails)
      REQUIRES(mutex_);
  // Refuses the ranks of a run that come later.
  void RefuseRun(int64_t run_id, const Status& reason) REQUIRES(mutex_);
  // Ends the runs that were refused here, in all communicators.
  void EndRefusedRuns() EXCLUDES(mutex_);
  // Keeps a closed round for another execution, once no rank is in its handler.
  void Recycle(std::unique_ptr<LocalRound> round) REQUIRES(mutex_);
  // Closes timed-out rounds in which nobody waits. Returns whether there are others.
  bool ForgetTimedOut(Clock::time_point now) REQUIRES(mutex_);
  bool HasTimedOut(const LocalRound& round, Clock::time_point now) const;
  // Records how a rank's call ended.
  void RecordOutcome(FlightRecorder::Ticket ticket, const Status& status);

  const HostContext& context_;
  const GroupMembers members_;
  RoundCarrier carrier_;

  mutable Mutex mutex_;
  Rendezvous<LocalRound> rounds_ GUARDED_BY(mutex_);
  // Of call sites whose plans do not depend on the values of operands.
  DerivedCache<HostPlan> plans_ GUARDED_BY(mutex_);
  const LocalTimeout timeout_;
  // Rounds that are over, but for ranks that have not left their handlers.
  Rendezvous<LocalRound>::Rounds lingering_ GUARDED_BY(mutex_);
  Status closed_ GUARDED_BY(mutex_);  // set once, by Abort()
  int64_t opened_ GUARDED_BY(mutex_) = 0;
  RunNumbers runs_ GUARDED_BY(mutex_);
  // Since EndRefusedRuns().
  std::vector<std::pair<int64_t, Status>> refused_runs_ GUARDED_BY(mutex_);
  std::vector<int64_t> calls_ GUARDED_BY(mutex_);  // completed, by collective
  int64_t bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_GROUP_H_
