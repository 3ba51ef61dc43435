// One thread of the process that polls what nobody waits for: operations that devices
// carry out by themselves, and ranks that wait for a rank which may never come.
#ifndef JAXCOMM_FFI_CORE_WATCHDOG_H_
#define JAXCOMM_FFI_CORE_WATCHDOG_H_

#include <limits>
#include <memory>

#include "ffi/base/status.h"

namespace jaxcomm {

class Watched : public std::enable_shared_from_this<Watched> {
 public:
  virtual ~Watched() = default;
  // Looks for what is done, has failed or is late. Returns whether to poll again after
  // the period; otherwise the next poll follows WakeWatchdog().
  virtual bool Poll() = 0;
  // How long Poll() may take, in seconds. A poll holds up all others, so the process
  // ends after that, with stuck_text(). By default there is no limit.
  virtual double poll_seconds() const {
    return std::numeric_limits<double>::infinity();
  }
  virtual const char* stuck_text() const { return ""; }
};

// Operations take ten microseconds or more; people read the records of them.
inline constexpr double kWatchSeconds = 0.005;

// From the next WakeWatchdog() on, polls `watched` every `period_seconds` until it is
// gone, or Unwatch(). Fails if the system refuses the thread.
Status Watch(const std::shared_ptr<Watched>& watched,
             double period_seconds = kWatchSeconds);

// Neither polls it any more nor keeps it. Waits for some seconds if it is being polled;
// where that hangs, the watchdog keeps it.
void Unwatch(const Watched& watched);

// Call this when there is something to look after.
void WakeWatchdog();

// Whether this is the watchdog's thread, which may hold the last reference to what it
// polls. What ends here must wait for nothing: nobody is polled meanwhile.
bool IsWatchdog();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_WATCHDOG_H_
