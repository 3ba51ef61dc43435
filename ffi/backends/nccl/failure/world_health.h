// What the communicators of a world know of each other's ends.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_WORLD_HEALTH_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_WORLD_HEALTH_H_

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

// Thread-safe.
class WorldHealth {
 public:
  explicit WorldHealth(bool spans_processes) : is_settled_(!spans_processes) {}

  // Whether a communicator was ended by force, and with it all that share with it, or
  // one could not be split off. Then no others are split off, and those that are live
  // take no more calls; what devices are at may still come to its end. The first reason
  // counts.
  bool is_broken() const { return is_broken_.load(); }
  void SetBroken(std::string_view why) {
    MutexLock lock(mutex_);
    if (is_broken_.load()) return;
    why_broken_ = why;
    is_broken_.store(true);
  }
  std::string why_broken() const {
    MutexLock lock(mutex_);
    return why_broken_;
  }

  // Whether this process sees other processes end, and which have, by JAX's index.
  bool sees_peers() const { return sees_peers_.load(); }
  void SeesPeers() { sees_peers_.store(true); }
  bool any_gone() const { return any_gone_.load(std::memory_order_acquire); }
  std::vector<int> gone() const {
    MutexLock lock(mutex_);
    return gone_;
  }
  // "process 1, process 3"
  std::string gone_text() const {
    std::string text;
    for (int process : gone()) {
      text += StrCat(text.empty() ? "" : ", ", "process ", process);
    }
    return text;
  }
  void AddGone(int process) {
    {
      MutexLock lock(mutex_);
      gone_.push_back(process);
    }
    any_gone_.store(true, std::memory_order_release);
  }

  // An abort makes a kernel of NCCL tell its peers of steps whose bytes were never
  // written, and one of ours leaves to another that overwrites what they read. So
  // poisoned operations are aborted only once every other process of the world has
  // poisoned its own, has closed them, or has ended: then the world is settled.
  void Settle() {
    MutexLock lock(settling_);
    is_settled_ = true;
    settled_.NotifyAll();
  }
  bool WaitUntilSettled(std::chrono::seconds most) {
    MutexLock lock(settling_);
    return settled_.WaitFor(settling_, most,
                            [this]() REQUIRES(settling_) { return is_settled_; });
  }

 private:
  std::atomic<bool> is_broken_{false}, sees_peers_{false}, any_gone_{false};
  mutable Mutex mutex_;
  std::string why_broken_ GUARDED_BY(mutex_);
  std::vector<int> gone_ GUARDED_BY(mutex_);
  Mutex settling_;
  ConditionVariable settled_;
  bool is_settled_ GUARDED_BY(settling_);
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_WORLD_HEALTH_H_
