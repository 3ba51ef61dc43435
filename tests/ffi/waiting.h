// Waiting in C++ tests: for events, never for the clock.
//
// A test ends its waits by what happens: a condition, an event, a thread that ends. The
// guard only tells a hang from a slow machine, so no outcome depends on it. No other
// file of tests/ffi sleeps, looks at a clock, or has a timeout under 30 s.
#ifndef JAXCOMM_TESTS_FFI_WAITING_H_
#define JAXCOMM_TESTS_FFI_WAITING_H_

#include <atomic>
#include <chrono>
#include <thread>

namespace jaxcomm::testing {

// The hang guard, in seconds. Also for timeouts of the product that must not expire.
inline constexpr double kHangSeconds = 120;

// A timeout of the product that is meant to expire, in seconds, since nothing can end
// that wait. Nothing else may have to happen within it.
inline constexpr double kExpires = 1;

// A timeout that has passed whenever the test itself looks for it.
inline constexpr double kAtOnce = 0;

// Looks until the condition is true. False: it hangs.
template <typename Condition>
bool Until(const Condition& condition) {
  const auto guard =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(kHangSeconds);
  for (int looks = 0; !condition(); ++looks) {
    if (std::chrono::steady_clock::now() > guard) return false;
    if (looks < 100) {
      std::this_thread::yield();
    } else {
      // Whoever is waited for may need this core.
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  return true;
}

// Happens once.
class Event {
 public:
  void Set() { is_set_ = true; }
  bool is_set() const { return is_set_; }
  // False: it hangs.
  bool Wait() const {
    return Until([this] { return is_set(); });
  }

 private:
  std::atomic<bool> is_set_{false};
};

// Gives other threads a chance to do what they must not do. If they are too slow, a
// test sees less, and passes.
inline void LetOthersRun() {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

// Blocks this thread for good: the process is to end here.
[[noreturn]] inline void Forever() {
  while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
}

// Seconds since it was made. What must take a while took at least that, on any machine.
class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_)
        .count();
  }

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_WAITING_H_
