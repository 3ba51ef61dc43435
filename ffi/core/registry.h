// The communicators of this process. Execution looks them up and never creates one.
#ifndef JAXCOMM_FFI_CORE_REGISTRY_H_
#define JAXCOMM_FFI_CORE_REGISTRY_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/core/communicator.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

struct RegistryCounters {
  int64_t created = 0;
  int64_t destroyed = 0;
};

class Registry {
 public:
  // Never destroyed: handlers may run while the process exits.
  static Registry& Get();

  // Adds `communicator` under its key. Fails if the key is taken.
  Status Add(std::shared_ptr<Communicator> communicator);

  // Returns null if there is no communicator under `key`.
  std::shared_ptr<Communicator> Find(int64_t key) const;

  // Finds the communicator for an execution of `site`. Fails for a run that found none
  // before, or that failed in one that was closed: some of its ranks are gone, and the
  // late ones would wait for them, on devices that the next run needs. Fails in a
  // forked child, for every backend: it would take its parent's part, with other
  // numbers.
  ErrorOr<std::shared_ptr<Communicator>> Find(CallSite& site, int64_t run_id);

  // Removes the communicator and aborts its pending calls.
  Status Remove(int64_t key);

  // Calls Interrupt() of all communicators.
  void Interrupt() const;
  // Calls EndRun() of all communicators.
  void EndRun(int64_t run_id, const Status& reason) const;

  std::vector<std::shared_ptr<Communicator>> List() const;
  RegistryCounters counters() const;

  // The error of an execution that found no communicator.
  Status MissingError(const CallSite& site) const;

 private:
  // The last runs that failed. Read without the lock, at every call.
  class FailedRuns {
   public:
    bool Contains(int64_t run_id) const {
      const size_t count = std::min(count_.load(std::memory_order_acquire), kKept);
      return std::any_of(runs_, runs_ + count, [&](const auto& run) {
        return run.load(std::memory_order_relaxed) == run_id;
      });
    }
    // One thread at a time.
    void Add(int64_t run_id) {
      if (Contains(run_id)) return;
      const size_t count = count_.load(std::memory_order_relaxed);
      runs_[count % kKept].store(run_id, std::memory_order_relaxed);
      count_.store(count + 1, std::memory_order_release);
    }

   private:
    static constexpr size_t kKept = 64;
    std::atomic<size_t> count_{0};
    std::atomic<int64_t> runs_[kKept] = {};
  };

  mutable SharedMutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Communicator>> communicators_
      GUARDED_BY(mutex_);
  FailedRuns failed_runs_;  // written under the lock
  RegistryCounters counters_ GUARDED_BY(mutex_);
  // Changes, under the lock, whenever a call site that found a communicator must look
  // again: one was removed.
  std::atomic<uint64_t> epoch_{1};
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_REGISTRY_H_
