#include "ffi/backends/nccl/world_health.h"

#include <algorithm>
#include <utility>

#include "ffi/backends/nccl/health.h"

namespace jaxcomm {

void WorldHealth::Add(std::weak_ptr<Health> sharer) {
  std::lock_guard<std::mutex> lock(mutex_);
  sharers_.erase(std::remove_if(sharers_.begin(), sharers_.end(),
                                [](const auto& each) { return each.expired(); }),
                 sharers_.end());
  sharers_.push_back(std::move(sharer));
}

std::vector<std::shared_ptr<Health>> WorldHealth::sharers() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Health>> live;
  for (const auto& each : sharers_) {
    if (auto sharer = each.lock()) live.push_back(std::move(sharer));
  }
  return live;
}

std::vector<int> WorldHealth::gone() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return gone_;
}

void WorldHealth::AddGone(int process) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    gone_.push_back(process);
  }
  any_gone_.store(true, std::memory_order_release);
}

}  // namespace jaxcomm
