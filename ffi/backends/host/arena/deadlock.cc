#include "ffi/backends/host/arena/deadlock.h"

#include <limits>
#include <memory>

#include "ffi/os/standstill.h"

namespace jaxcomm {

std::atomic<size_t>& WaitsOfProcess() {
  static std::atomic<size_t> waits{0};
  return waits;
}

Grace Grace::OfThisProcess(double seconds) {
  const auto standstill = std::make_shared<Standstill>();
  standstill->Learn();
  Grace grace;
  grace.seconds = seconds;
  grace.stands_still = [standstill](size_t waits) {
    // What ends in another set may wake this process.
    return standstill->Look() && waits == WaitsOfProcess();
  };
  grace.learn = [standstill] { standstill->Learn(); };
  return grace;
}

double Deadlock::seconds() const {
  return grace_.seconds > 0 ? grace_.seconds / 2
                            : std::numeric_limits<double>::infinity();
}

uint64_t Deadlock::Find(const std::vector<const Transfer*>& transfers, uint64_t gone,
                        Clock::time_point since, Clock::time_point now) {
  const std::chrono::duration<double> waited = now - since;
  if (transfers.empty() || waited.count() < grace_.seconds / 2) return 0;
  for (const Transfer* transfer : transfers) {
    if (!transfer->has_joined()) return 0;  // the table is full
    transfer->SayWhatItLacks();
  }
  // Nearly always the others wait for nothing, or compute. Then this is all.
  if ((arena_->WaitForEachOther(~gone) & me()) == 0 ||
      !HasStoodStill(transfers.size(), now))
    return 0;
  arena_->process(arena_->self()).stands_still.store(true, std::memory_order_release);
  const uint64_t stuck = arena_->WaitForEachOther(arena_->standing_still() & ~gone);
  if ((stuck & me()) == 0) return 0;
  // One of them tells all, while the others still wait where it says.
  const uint64_t first = stuck & -stuck;
  if (first == me()) return stuck;
  arena_->Ring(first);
  return 0;
}

void Deadlock::GoOn() {
  arena_->process(arena_->self()).stands_still.store(false, std::memory_order_release);
}

bool Deadlock::HasStoodStill(size_t waits, Clock::time_point now) {
  const std::chrono::duration<double> passed = now - looked_;
  if (passed.count() >= grace_.seconds / 2) {
    if (!grace_.stands_still(waits)) {
      still_since_.reset();
    } else if (!still_since_) {
      still_since_ = looked_;
    }
    looked_ = now;
  }
  if (!still_since_) return false;
  const std::chrono::duration<double> still = now - *still_since_;
  return still.count() >= grace_.seconds;
}

}  // namespace jaxcomm
