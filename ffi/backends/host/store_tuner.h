// Whether what one process writes and another reads goes through their caches.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_STORE_TUNER_H_
#define JAXCOMM_FFI_BACKENDS_HOST_STORE_TUNER_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace jaxcomm {

// Cores that share a cache read what the other wrote from there. Between others, of
// another part of the processor or another socket, each line is asked for one at a
// time, and chunks that went to memory arrive sooner: 16 MiB each way between two
// processes took 2.4 ms through a shared cache and 2.8 through memory, but 8 without a
// shared one and 2.1. The system's description of the
// caches does not help: a virtual machine's cores move while it runs. So both ways are
// timed, the slower one seldom. This machine's cores shared a cache at a later test;
// then neither way was measurably faster.
class StoreTuner {
 public:
  enum Step { kWrite, kRead };

  // How the next chunk is to be written.
  bool NextPastCaches() {
    const bool better = Cost(true) < Cost(false);
    const uint32_t chunk = chunks_.fetch_add(1, std::memory_order_relaxed);
    return (chunk % kTryAgain == kTryAgain - 1) != better;
  }

  // How long a step with a chunk took that was written this way.
  void Took(Step step, bool past_caches, int64_t bytes, uint64_t ticks) {
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

 private:
  // One chunk in so many goes the way that seems worse.
  static constexpr uint32_t kTryAgain = 64;

  // An estimate goes up by so much at a sample, however far off that is, and down by
  // up to half: a thread that lost its core in between took long, and none
  // was ever too fast.
  static constexpr float kUp = 1.125f;
  static constexpr float kDown = 0.5f;

  float Cost(bool past_caches) const {
    return estimates_[kWrite][past_caches].load(std::memory_order_relaxed) +
           estimates_[kRead][past_caches].load(std::memory_order_relaxed);
  }

  // Ticks per KiB of late, when nothing came in between; 0: not known.
  std::atomic<float> estimates_[2][2] = {};
  std::atomic<uint32_t> chunks_{0};
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_STORE_TUNER_H_
