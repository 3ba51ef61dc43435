#include "ffi/backends/host/store_tuner.h"

#include <algorithm>

namespace jaxcomm {
namespace {

// One chunk in so many goes the way that seems worse.
constexpr uint32_t kTryAgain = 64;

// An estimate goes up by so much at a sample, however far off that is, and down by
// up to half: a thread that lost its core in between took long, and none
// was ever too fast.
constexpr float kUp = 1.125f;
constexpr float kDown = 0.5f;

}  // namespace

bool StoreTuner::NextPastCaches() {
  const bool better = Cost(true) < Cost(false);
  const uint32_t chunk = chunks_.fetch_add(1, std::memory_order_relaxed);
  return (chunk % kTryAgain == kTryAgain - 1) != better;
}

void StoreTuner::Took(Step step, bool past_caches, int64_t bytes, uint64_t ticks) {
  if (bytes <= 0) return;
  const float sample = static_cast<float>(ticks) * 1024 / static_cast<float>(bytes);
  // Threads that meet here lose a sample, no more.
  std::atomic<float>& estimate = estimates_[step][past_caches];
  const float before = estimate.load(std::memory_order_relaxed);
  if (before != 0) {
    estimate.store(std::clamp(sample, before * kDown, before * kUp),
                   std::memory_order_relaxed);
    return;
  }
  estimate.store(sample, std::memory_order_relaxed);
  std::atomic<float>& other = estimates_[step][!past_caches];
  if (other.load(std::memory_order_relaxed) == 0) {
    other.store(sample, std::memory_order_relaxed);
  }
}

float StoreTuner::Cost(bool past_caches) const {
  return estimates_[kWrite][past_caches].load(std::memory_order_relaxed) +
         estimates_[kRead][past_caches].load(std::memory_order_relaxed);
}

}  // namespace jaxcomm
