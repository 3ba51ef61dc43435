// The host backend for groups whose ranks all live in this process: they share
// an address space, so the last rank to arrive (or, pairwise, the later of two)
// moves the bytes straight from operand to result, and nobody waits on a thread.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "ffi/backends/host/continuer.h"
#include "ffi/backends/host/execute.h"
#include "ffi/communicator.h"
#include "ffi/plan.h"

namespace jaxcomm {

class LocalCommunicator final : public Communicator {
 public:
  explicit LocalCommunicator(CommunicatorSpec spec);
  ~LocalCommunicator() override;

  xla::ffi::Future Execute(const Call& call) override;
  void Abort(const Status& reason) override;
  CommunicatorStats stats() const override;

  // Fails what has waited past its deadline at `now`.
  void ExpireBefore(std::chrono::steady_clock::time_point now);

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
    // Waits in its handler, on its own thread, for a moment: it then completes its
    // promise itself, with `status`, once `settled` says so.
    bool spins = false;
    std::atomic<bool> settled{false};
    Status status;
    int moves_left = 0;  // pairwise: before this rank is done
    std::vector<const void*> operands;
    std::vector<void*> results;
    std::vector<xla::ffi::Promise> promise;  // one while waiting, else none
  };

  // The ranks of a group at one execution of one call site.
  struct Meeting {
    int64_t run_id = 0;
    uint64_t tag = 0;
    uint64_t signature = 0;
    CallSite* call_site = nullptr;
    const Plan* plan = nullptr;
    Plan own_plan;  // of collectives that plan from operand values
    int arrived = 0;
    int left = 0;    // ranks not done
    int moving = 0;  // threads moving bytes for it
    Clock::time_point first_arrival;
    std::deque<Seat> seats;                    // a Seat does not move
    std::vector<const void* const*> operands;  // seats' arrays, by rank
    std::vector<void* const*> results;
    std::vector<int> waiting_for;  // pairwise: ranks each move still lacks
    std::vector<int> all_moves;
    int spinning = 0;  // ranks that wait in their handlers
    Offer offer{nullptr};
    std::vector<std::shared_ptr<SharedBlocks>> offered;
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

  struct Group {
    std::mutex mutex;
    std::vector<int64_t> devices;
    std::vector<std::unique_ptr<Meeting>> active;  // in order of first arrival
    std::vector<std::unique_ptr<Meeting>> free;
    // Over, but for ranks that have not left their handlers.
    std::vector<std::unique_ptr<Meeting>> lingering;
    std::deque<Tombstone> tombstones;
    Status closed;               // set once by Abort
    std::vector<int64_t> calls;  // completed, by collective
    int64_t bytes = 0;
  };

  std::unique_ptr<Meeting> Open(Group& group, const Call& call);
  void Close(Group& group, Meeting* meeting);
  void Recycle(Group& group, std::unique_ptr<Meeting> meeting);
  // Waits in the handler for a moment, if the missing ranks leave a core for it. Then
  // the rank goes on on its own thread, or leaves its promise to be completed.
  void SpinBriefly(Group& group, int rank, std::unique_lock<std::mutex> lock,
                   Meeting* meeting);
  // Ends a rank's wait: hands its promise to `out`, or lets it leave its handler.
  static void Settle(Seat& seat, Status status, std::vector<Continuation>* out);
  // Fails every waiting rank; give the result to Continue().
  std::vector<Continuation> Fail(Group& group, Meeting* meeting,
                                 const Failure& failure);
  Failure Timeout(const Group& group, const Meeting& meeting) const;

  xla::ffi::Future ArriveTogether(Group& group, int rank, const Call& call,
                                  std::unique_lock<std::mutex> lock, Meeting* meeting,
                                  xla::ffi::Future future);
  xla::ffi::Future ArrivePairwise(Group& group, int rank, const Call& call,
                                  std::unique_lock<std::mutex> lock, Meeting* meeting,
                                  xla::ffi::Future future);

  std::string Where(const Group& group, int rank) const;
  std::string TimeoutText(const Group& group, const Meeting& meeting, int rank) const;

  std::unordered_map<int64_t, Member> members_;
  std::vector<std::unique_ptr<Group>> groups_;
};

// Makes a local communicator and has it watched for deadlines.
std::shared_ptr<Communicator> MakeLocalCommunicator(CommunicatorSpec spec);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_H_
