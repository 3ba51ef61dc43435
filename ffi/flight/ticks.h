// A clock that costs a few nanoseconds to read: the processor's own counter where it
// runs at one rate on all cores, else the steady clock.
#ifndef JAXCOMM_FFI_FLIGHT_TICKS_H_
#define JAXCOMM_FFI_FLIGHT_TICKS_H_

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace jaxcomm {

// Whether the time-stamp counter keeps its rate and runs on in every power state.
extern const bool kInvariantTicks;

inline uint64_t Ticks() {
#if defined(__x86_64__)
  if (kInvariantTicks) return __rdtsc();
#elif defined(__aarch64__)
  uint64_t count;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#endif
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                               std::chrono::nanoseconds(1));
}

// Converts ticks to seconds. Construct it before the first tick is taken: it
// interpolates between its construction and the reading, so even a short life is
// precise.
class TickScale {
 public:
  TickScale();

  struct Reading {
    uint64_t ticks;
    double seconds_per_tick;
    double unix_seconds;  // at `ticks`

    double Seconds(uint64_t from, uint64_t to) const;
    double UnixSeconds(uint64_t at) const { return unix_seconds - Seconds(at, ticks); }
  };
  Reading Read() const;

 private:
  std::chrono::steady_clock::time_point first_time_;
  uint64_t first_ticks_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_FLIGHT_TICKS_H_
