// The reasons for which the communicators of a world fail together.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_WORLD_HEALTH_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_WORLD_HEALTH_H_

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace jaxcomm {

class Health;

// Thread-safe.
class WorldHealth {
 public:
  // The communicators that share NCCL's resources. NCCL has one abort flag for all of
  // them and reports to none that it was set: they fail together.
  void Add(std::weak_ptr<Health> sharer) {
    std::lock_guard<std::mutex> lock(mutex_);
    sharers_.erase(std::remove_if(sharers_.begin(), sharers_.end(),
                                  [](const auto& each) { return each.expired(); }),
                   sharers_.end());
    sharers_.push_back(std::move(sharer));
  }
  std::vector<std::shared_ptr<Health>> sharers() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Health>> live;
    for (const auto& each : sharers_) {
      if (auto sharer = each.lock()) live.push_back(std::move(sharer));
    }
    return live;
  }

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
  std::vector<std::weak_ptr<Health>> sharers_;
  std::vector<int> gone_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_WORLD_HEALTH_H_
