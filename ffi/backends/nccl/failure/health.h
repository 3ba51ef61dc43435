// The health of a communicator: whether it takes calls, and why not. It fails with all
// others of the process, see process_failure.h.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_HEALTH_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_HEALTH_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/failure/failure_detector.h"
#include "ffi/backends/nccl/failure/poison.h"
#include "ffi/backends/nccl/failure/process_failure.h"
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
    kStopping,  // closed: refuses calls, and NCCL's part ends in order
    kFailed,    // refuses calls, and NCCL's part cannot end in order
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

  // Whether it refuses every call from now on, and nothing comes to its end.
  bool failed() const { return state() >= State::kStopping; }
  Status failure() const;
  // Why nothing can come to its end: it has failed, or the devices are stopped.
  Status Broken() const;
  // Why it takes no calls: that, or the world takes none.
  Status Refusal() const;
  // Whether NCCL's part cannot end in order.
  bool ends_by_force() const {
    return state() == State::kFailed || policy_.world->is_broken();
  }

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
  // Fails all communicators of the process.
  void Fail(const Cause& cause) { ProcessFailure::Get().Fail(*this, cause); }
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

  // Watched:
  bool Poll() override;
  double poll_seconds() const override;
  const char* stuck_text() const override { return kDriverStuck; }

 private:
  friend class ProcessFailure;  // has it fail, and aborts what it is at

  // For NCCL's kernels to leave after an abort.
  static constexpr double kAbortSeconds = 10;

  State state() const { return state_.load(std::memory_order_acquire); }
  bool is_busy() const;
  bool PollLocked() REQUIRES(polling_);
  // Whether each group has its ranks in one process.
  bool is_of_one_process() const;
  // The devices, by ordinal, that a stop waits for after a failure.
  std::set<int64_t> WorthWaitingFor(const Status& reason) const;
  // Refuses calls from now on. Returns false if it refused them before.
  bool Refuse(State state, const Status& reason, bool names_a_call);
  bool SetFailed(const Status& reason, bool names_a_call);
  // Returns the error of a call to a communicator that has failed.
  Status FailureOf(const Call& call, const RankFacts& rank) const;
  void RefuseInEngines();
  bool IsInNccl(const LocalRank& rank) const;

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
