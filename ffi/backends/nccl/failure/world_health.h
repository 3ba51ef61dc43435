// What the communicators of a world know of each other's ends.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_WORLD_HEALTH_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_WORLD_HEALTH_H_

#include <atomic>
#include <mutex>
#include <vector>

namespace jaxcomm {

// Thread-safe.
class WorldHealth {
 public:
  // Whether a communicator was ended by force, and with it all that share with it. Then
  // no others can be split off.
  bool is_broken() const { return is_broken_.load(); }
  void SetBroken() { is_broken_.store(true); }

  // Whether this process sees other processes end, and which have, by JAX's index.
  bool sees_peers() const { return sees_peers_.load(); }
  void SeesPeers() { sees_peers_.store(true); }
  bool any_gone() const { return any_gone_.load(std::memory_order_acquire); }
  std::vector<int> gone() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return gone_;
  }
  void AddGone(int process) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      gone_.push_back(process);
    }
    any_gone_.store(true, std::memory_order_release);
  }

 private:
  std::atomic<bool> is_broken_{false}, sees_peers_{false}, any_gone_{false};
  mutable std::mutex mutex_;
  std::vector<int> gone_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_WORLD_HEALTH_H_
