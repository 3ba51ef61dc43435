// How a process of an arena wakes another one that waits for it.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_ARENA_DOORBELL_H_
#define JAXCOMM_FFI_BACKENDS_HOST_ARENA_DOORBELL_H_

#include <atomic>
#include <cstdint>

namespace jaxcomm {

// In shared memory, of one process, whose progress thread alone sleeps on it. It looks
// at rings(), then for work, says that it sleeps, looks for work once more, and sleeps:
// whoever publishes work before it looked need not ring, and whoever does later rings.
class Doorbell {
 public:
  // Times it was rung.
  uint32_t rings() const { return rings_.load(std::memory_order_acquire); }

  // The sleeper announces its sleep. If it is idle, only its own process wakes it.
  void FallAsleep(bool is_idle);
  void WakeUp() { asleep_.store(kAwake, std::memory_order_relaxed); }

  // Sleeps until it was rung more often than `seen`, at most so long.
  void Sleep(uint32_t seen, double seconds);

  // From another process, after a fence: wakes the sleeper if it waits for others.
  void Ring();
  // From the sleeper's own process: wakes it whatever it waits for.
  void RingOwn();

 private:
  enum Sleeper : uint32_t { kAwake, kWaiting, kIdle };

  void Wake();

  std::atomic<uint32_t> rings_;  // a futex
  std::atomic<uint32_t> asleep_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_ARENA_DOORBELL_H_
