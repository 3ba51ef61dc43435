#include "ffi/flight/ticks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace jaxcomm {
namespace {

bool HasInvariantTicks() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kPowerManagement = 0x80000007, kInvariantTsc = 1u << 8;
  return __get_cpuid(kPowerManagement, &eax, &ebx, &ecx, &edx) != 0 &&
         (edx & kInvariantTsc) != 0;
#else
  return true;
#endif
}

}  // namespace

const bool kInvariantTicks = HasInvariantTicks();

TickScale::TickScale()
    : first_time_(std::chrono::steady_clock::now()), first_ticks_(Ticks()) {}

TickScale::Reading TickScale::Read() const {
  const auto now = std::chrono::steady_clock::now();
  const uint64_t ticks = Ticks();
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  const double seconds = std::chrono::duration<double>(now - first_time_).count();
  Reading reading;
  reading.ticks = ticks;
  reading.seconds_per_tick =
      ticks > first_ticks_ ? seconds / static_cast<double>(ticks - first_ticks_) : 0;
  reading.unix_seconds = std::chrono::duration<double>(wall).count();
  return reading;
}

double TickScale::Reading::Seconds(uint64_t from, uint64_t to) const {
  // Counters of two cores may disagree by a few ticks.
  return to > from ? static_cast<double>(to - from) * seconds_per_tick : 0;
}

}  // namespace jaxcomm
