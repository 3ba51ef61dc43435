// The health of a communicator: whether it takes calls, why not, and how it ends.
//
// Nothing is aborted while a device is at it, unless its results are poisoned first:
// XLA takes what an aborted operation leaves in memory for its result. And what one
// waits for may be what others wait for: their operations wait for the same rank, an
// abort of one waits for the device that another is at, and NCCL's abort flag belongs
// to all that share resources. So a failure is the failure of all communicators of the
// process, and there is one way to end:
//   1. wait a moment for what is about to end;
//   2. refuse every call from now on, and set the poison word, if there is one;
//   3. if a device is at an operation, do what the strictest policy says of those that
//      have some: stop the GPUs of this process (device_stop.h), end the process, or
//      abort the poisoned operations, on threads of their own, since an abort waits for
//      the device, and once other processes have poisoned theirs (world_health.h). What
//      stops GPUs also aborts what keeps threads inside NCCL, which looks at no device
//      there, once no number can leave any more;
//   4. a last resort (last_resort.h) ends the process if a step does not end.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_HEALTH_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_HEALTH_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/backends/nccl/failure/failure_detector.h"
#include "ffi/backends/nccl/failure/poison.h"
#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/failure/world_health.h"
#include "ffi/backends/nccl/library/library.h"
#include "ffi/backends/nccl/library/rank_facts.h"
#include "ffi/base/keep_forever.h"
#include "ffi/core/communicator.h"
#include "ffi/core/watchdog.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

class Engine;

class Health final : public Watched {
 public:
  enum class State {
    kLive,
    kSuspended,  // NCCL gave its memory back: refuses calls until it is live again
    kStopping,   // closed: refuses calls, and NCCL's part ends in order
    kFailed,     // refuses calls, and NCCL's part cannot end in order
  };

  struct Policy {
    std::shared_ptr<WorldHealth> world;
    OnFailure on_failure = OnFailure::kRaise;
  };

  // All must outlive it. `ranks` may be empty as yet.
  Health(const CommunicatorSpec& spec, Policy policy, const LocalRanks& ranks);
  ~Health() override;

  // Adds a part that it looks after. Requires that nothing can fail yet.
  void Add(Engine& engine) { engines_.push_back(&engine); }
  void Add(std::unique_ptr<Poison> poison) { poison_ = std::move(poison); }
  // Leaves the poison to graphs, which may read its word as long as the process lives.
  void KeepPoison() { KeepForever(std::move(poison_)); }

  // `owner`: of this, which is kept while it is polled or aborted. From now on it fails
  // with the others.
  void SetOwner(const std::shared_ptr<void>& owner);
  // Has the watch poll it, once it is made.
  Status BeWatched();
  // How many of this process are watched.
  static int64_t num_watched() { return num_watched_.load(); }

  State state() const { return state_.load(std::memory_order_acquire); }
  // Whether it refuses every call from now on.
  bool failed() const { return state() >= State::kStopping; }
  Status failure() const;
  // Why nothing can come to its end: it has failed, or the devices are stopped.
  Status Broken() const;
  // Why a call is refused now; OkStatus() if it is not.
  Status Refusal() const;
  void SetSuspended(bool is_suspended);

  bool has_poison() const { return poison_ != nullptr; }
  // Gives `stream` what poisons the results of a call, if that is the policy.
  Status GivePoison(const Call& call, const RankFacts& rank,
                    cuda::Stream stream) const {
    return poison_ == nullptr ? OkStatus() : poison_->Give(call, rank.place, stream);
  }

  // Returns the error of a call that could not be given to a stream. Fails the
  // communicator, unless the reason concerns this call alone.
  Status FailCall(const Call& call, const RankFacts& rank, const Status& status);
  // Likewise, and always fails the communicator.
  Status FailBy(const Call& call, const RankFacts& rank, const Status& status);
  // Fails all as written above. `names_a_call`: whether the reason does, as the text of
  // an error must. `dump`: the reason of the flight record that is written if something
  // was in flight; null: none. `is_closing`: the process goes on, since a process that
  // closes what it has before it ends keeps its status.
  void Fail(const Status& reason, bool names_a_call = true, const char* dump = nullptr,
            bool is_closing = false);
  // Fails those that span processes because another process says that something failed
  // there. Also those that are being made.
  static void FailAllElsewhere(const std::string& reason);
  // Has all communicators of a world refuse calls, and ends nothing. Returns whether a
  // device is at an operation of one.
  static bool RefuseAllOf(const WorldHealth& world, const Status& reason);
  // Refuses calls, and waits for those in flight. What does not end fails.
  void Close(const Status& reason);

  // Counts a thread that calls NCCL for other than a program, before it looks whether
  // this has failed. A failure aborts what keeps it.
  class InNccl {
   public:
    explicit InNccl(Health& health) : health_(health) { ++health_.in_nccl_; }
    ~InNccl() { --health_.in_nccl_; }
    InNccl(const InNccl&) = delete;
    InNccl& operator=(const InNccl&) = delete;

   private:
    Health& health_;
  };

  // Adds to a patience what else ends it: the end of this, or of a process it needs.
  NcclPatience WhileWell(NcclPatience patience) const;

  // Whether a device may be at an operation of any communicator of this process.
  static bool IsAnyBusy();
  // Waits for the threads that abort operations and free what failed: a process that
  // ends meanwhile takes the driver from them. Returns whether all are done in time.
  static bool WaitForAborts(double seconds);

  // Watched:
  bool Poll() override;
  double poll_seconds() const override;
  const char* stuck_text() const override { return kDriverStuck; }

 private:
  using All = std::vector<std::shared_ptr<Health>>;

  bool is_busy() const;
  bool PollLocked() REQUIRES(polling_);
  // The strictest policy of those that are busy, nothing if none is. Waits some
  // milliseconds for what is about to end.
  static std::optional<OnFailure> StrictestSoon(const All& all);
  static std::optional<OnFailure> Strictest(const All& all);
  // Whether each group has its ranks in one process.
  bool is_of_one_process() const;
  // The devices, by ordinal, that a stop waits for after a failure.
  std::set<int64_t> WorthWaitingFor(const Status& reason) const;
  // Refuses calls from now on. Returns false if it refused them before.
  bool Refuse(State state, const Status& reason, bool names_a_call);
  bool SetFailed(const Status& reason, bool names_a_call);
  void FailElsewhere(const std::string& reason);
  // Returns the error of a call to a communicator that has failed.
  Status FailureOf(const Call& call, const RankFacts& rank) const;
  void RefuseInEngines();
  // What an abort is for, and so what it waits for first.
  enum class Ends {
    kPoisoned,  // operations whose results are poisoned, in all processes
    // What keeps threads inside NCCL: nothing was in flight, or once the devices are
    // stopped.
    kThreadsInNccl,
  };
  bool IsInNccl(const LocalRank& rank) const;
  void AbortElsewhere(Ends what);
  void AbortRank(LocalRank& rank, Ends what);

  static inline std::atomic<int64_t> num_watched_{0};

  const CommunicatorSpec& spec_;
  const Policy policy_;
  std::weak_ptr<void> owner_;
  bool is_watched_ = false;
  const LocalRanks& ranks_;
  std::vector<Engine*> engines_;
  FailureDetector detector_;  // looks under `polling_`
  std::unique_ptr<Poison> poison_;

  std::atomic<State> state_{State::kLive};
  std::atomic<int> in_nccl_{0};
  mutable Mutex mutex_;
  Status failure_ GUARDED_BY(mutex_) = OkStatus();
  bool failure_names_call_ GUARDED_BY(mutex_) = true;
  Mutex polling_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_HEALTH_H_
