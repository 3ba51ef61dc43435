// The host backend. Ranks of one process share an address space: the last to arrive
// (or, pairwise, the later of two) moves the bytes straight from operand to result,
// and nobody waits on a thread. Where a group spans processes, the last rank of each
// process to arrive takes them all across, through shared memory.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "ffi/backends/host/continuer.h"
#include "ffi/backends/host/execute.h"
#include "ffi/backends/host/process_set.h"
#include "ffi/backends/host/transfer.h"
#include "ffi/core/communicator.h"
#include "ffi/core/watchdog.h"

namespace jaxcomm {

class LocalCommunicator final : public Communicator, public Watched {
 public:
  explicit LocalCommunicator(CommunicatorSpec spec);
  ~LocalCommunicator() override;

  xla::ffi::Future Execute(const Call& call) override;
  void Abort(const Status& reason) override;
  std::vector<int64_t> FailedRuns() const override;
  CommunicatorStats stats() const override;

  // Watched: fails what has waited past its deadline.
  bool Poll() override;

 private:
  using Clock = std::chrono::steady_clock;

  struct Member {
    int group;
    int rank;
  };

  // One rank in a meeting.
  struct Seat {
    enum State : uint8_t { kAbsent, kWaiting, kDone };
    State state = kAbsent;
    // How it waits in its handler, on its own thread, for a moment: it then completes
    // its promise itself, with `status`, once `settled` says so.
    enum Stay : uint8_t { kNone, kLooksOut, kSleeps };
    Stay stay = kNone;
    std::atomic<bool> settled{false};
    std::condition_variable woken;  // if it sleeps: `settled`, or to look out
    Status status;
    int moves_left = 0;  // pairwise: before this rank is done
    FlightRecorder::Ticket ticket = 0;
    std::vector<const void*> operands;
    std::vector<void*> results;
    std::vector<xla::ffi::Promise> promise;  // one while waiting, else none
  };

  // What the ranks of all processes tell each other before a plan can be made of the
  // values of their operands.
  struct Exchange {
    std::vector<int> targets;  // a rank of each process
    HostPlan plan;
    StreamPlan stream;
    std::vector<std::vector<char>>
        gathered;                // by operand: all ranks', one after another
    std::vector<void*> results;  // the same, as pointers
    std::vector<void* const*> results_of;
    std::vector<const void*> operands;  // by rank and operand, as planners want them
    std::vector<const void* const*> operands_of;
  };

  // The ranks of a group at one execution of one call site.
  struct Meeting {
    int64_t run_id = 0;
    uint64_t tag = 0;
    uint64_t signature = 0;
    // Alive while a rank waits or is in its handler: XLA keeps the program of an
    // execution. A pairwise meeting may last longer, with neither.
    CallSite* call_site = nullptr;
    std::shared_ptr<const std::string> label;  // the call site's, for messages
    const HostPlan* plan = nullptr;
    HostPlan own_plan;  // of collectives that plan from operand values
    int arrived = 0;
    int left = 0;    // ranks not done
    int moving = 0;  // threads moving bytes for it
    Clock::time_point first_arrival;
    std::deque<Seat> seats;                    // a Seat does not move
    std::vector<const void* const*> operands;  // seats' arrays, by rank
    std::vector<void* const*> results;
    std::vector<int> waiting_for;  // pairwise: ranks each move still lacks
    std::vector<int> all_moves;
    bool is_alone = false;
    int staying = 0;      // ranks that wait in their handlers
    int looking_out = 0;  // of them, those that can help to move
    Offer offer{nullptr};
    std::vector<std::shared_ptr<SharedBlocks>> offered;

    // Where the group spans processes.
    Transfer transfer;
    std::shared_ptr<const StreamPlan> stream;
    std::unique_ptr<Exchange> exchange;  // while it is under way
    int64_t sequence = 0;                // how many-th of the group
    uint64_t run = 0;                    // number of the run, the same on all processes
  };

  // What the ranks of a meeting are told when it fails.
  struct Failure {
    ErrorCode code = ErrorCode::kInternal;
    std::string to_the_late;  // and to all, if there is nothing else
    std::vector<std::string> to_rank = {};

    const std::string& TextOf(int rank) const {
      return to_rank.empty() ? to_the_late : to_rank[rank];
    }
  };

  // Why late ranks of a failed meeting must not wait.
  struct Tombstone {
    int64_t run_id;
    uint64_t tag;
    Status reason;
    int absent;
  };

  // The runs of a program that came to a group, counted from the making of the
  // communicator. XLA's run ids do not serve between processes: they depend on where
  // the source file lies, and stay apart for good once one process ran alone.
  struct Runs {
    uint64_t count = 0;
    std::deque<std::pair<int64_t, uint64_t>> recent;  // run id, number
  };

  struct Group {
    std::mutex mutex;
    std::vector<int64_t> devices;
    std::vector<int> here;                    // ranks of this process
    std::vector<int> process_of;              // by rank; empty if all are here
    uint64_t members = 0;                     // mask of processes
    uint64_t id = 0;                          // unique in this process
    uint64_t index = 0;                       // the same on all processes
    int64_t opened = 0;                       // meetings
    std::unordered_map<uint64_t, Runs> runs;  // by program
    // All ranks of this process are there; the process set's thread carries them on.
    std::vector<std::unique_ptr<Meeting>> crossing;
    std::vector<std::unique_ptr<Meeting>> active;  // in order of first arrival
    std::vector<std::unique_ptr<Meeting>> free;
    // Over, but for ranks that have not left their handlers.
    std::vector<std::unique_ptr<Meeting>> lingering;
    std::deque<Tombstone> tombstones;
    Status closed;               // set once by Abort
    std::vector<int64_t> calls;  // completed, by collective
    int64_t bytes = 0;
  };

  void AbortMeetings(const Status& reason);
  static uint64_t NumberOf(Runs& runs, int64_t run_id);
  Status Open(Group& group, const Call& call, Meeting** opened);
  Status FindPlan(const Group& group, const Call& call, Meeting* meeting);
  void Close(Group& group, Meeting* meeting);
  void Recycle(Group& group, std::unique_ptr<Meeting> meeting);
  // Waits in the handler for a moment, where that is worth the thread. Then the rank
  // goes on on its own thread, or leaves its promise to be completed.
  void WaitBriefly(Group& group, int rank, std::unique_lock<std::mutex> lock,
                   Meeting* meeting);
  static Seat::Stay HowToStay(const Group& group, const Meeting& meeting);
  // Whether no rank is known to begin another call before it has left this one.
  static bool IsAlone(const Meeting& meeting);
  // Has ranks that sleep help to move, on the cores that are left; returns how many.
  static int WakeHelpers(Meeting& meeting);
  // Until the seat is settled or kSpin is over, moving what is offered.
  static void LookOut(const Seat& seat, const Offer& offer);
  // Records how a rank's call ended.
  void Land(FlightRecorder::Ticket ticket, const Status& status);
  // Ends a rank's wait: hands its promise to `out`, or lets it leave its handler.
  void Settle(Seat& seat, Status status, std::vector<Continuation>* out);
  // Fails every waiting rank; give the result to Continue().
  std::vector<Continuation> Fail(Group& group, Meeting* meeting,
                                 const Failure& failure);
  Failure Timeout(const Group& group, const Meeting& meeting) const;
  // Whether a rank waits. Requires the group's mutex.
  static bool HasWaiting(const Meeting& meeting);
  // Whether the hint of the spec fits: a rank waits, and a rank of this process is
  // missing and waits nowhere else. Requires the group's mutex.
  bool MayLackThreads(const Group& group, const Meeting& meeting) const;
  // Prints the hint of the spec once, if it fits. For the watchdog's thread alone.
  void WarnIfThreadsMayLack(Clock::time_point now);
  // Success unless the communicator is closed or the call's meeting has failed.
  Status ReasonNotToWait(Group& group, const Call& call);
  // Fails the meeting of others that a rank came to with another call.
  Status Mismatch(Group& group, int rank, const Call& call,
                  std::unique_lock<std::mutex> lock, Meeting* meeting,
                  FlightRecorder::Ticket ticket);

  xla::ffi::Future ArriveTogether(Group& group, int rank, const Call& call,
                                  std::unique_lock<std::mutex> lock, Meeting* meeting,
                                  xla::ffi::Future future);
  xla::ffi::Future ArrivePairwise(Group& group, int rank, const Call& call,
                                  std::unique_lock<std::mutex> lock, Meeting* meeting,
                                  xla::ffi::Future future);

  // Ends a meeting whose bytes have moved, or failed to. `rank`, if any, is the one
  // whose handler this is.
  void Complete(Group& group, std::unique_ptr<Meeting> meeting, int rank,
                Status status);

  // Takes the ranks of this process to those of others. `waiting` of them look out for
  // blocks to move.
  void Cross(Group& group, int rank, const Call& call, std::unique_ptr<Meeting> meeting,
             int waiting);
  void BeginMoves(Group& group, const Call& call, Meeting* meeting, int waiting);
  void BeginExchange(Group& group, const Call& call, Meeting* meeting);
  // After a transfer: true if that was all, with how it ended; else begins the next.
  bool NextTransfer(Group& group, const Call& call, Meeting* meeting, Status* status);
  void ContinueCrossing(Group& group, const Call& call, Meeting* meeting);
  Transfer::Meeting MeetingPlace(const Group& group, const Call& call,
                                 const Meeting& meeting, uint64_t step) const;
  // What a peer found wrong, told from here.
  Status InOurWords(const Group& group, const Meeting& meeting,
                    const Status& status) const;
  std::string CallerText(const Group& group, const Meeting& meeting) const;
  std::string CrossingText(const Group& group, const Meeting& meeting,
                           uint64_t processes, bool gone) const;

  std::string Where(const Group& group, int rank) const;
  std::string TimeoutText(const Group& group, const Meeting& meeting, int rank) const;

  const uint64_t id_;  // unique in this process
  std::unordered_map<int64_t, Member> members_;
  std::vector<std::unique_ptr<Group>> groups_;
  bool has_warned_ = false;  // see WarnIfThreadsMayLack
};

// Makes a local communicator and has it watched for timeouts. If the system refuses the
// threads that this takes, every call of the communicator fails and says so.
std::shared_ptr<Communicator> MakeLocalCommunicator(CommunicatorSpec spec);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_H_
