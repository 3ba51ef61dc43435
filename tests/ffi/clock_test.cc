// Tests that who sets the system's clock back delays no wait: the clock is an hour
// ahead of that by which the kernel ends waits, as if it was set back since.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <thread>

#include "ffi/core/last_resort.h"
#include "ffi/core/watchdog.h"
#include "ffi/os/mutex.h"
#include "tests/ffi/check.h"

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += 3600;
  return result;
}

namespace jaxcomm::testing {
namespace {

#if !defined(__SANITIZE_THREAD__)  // its waits go by the system's clock

TEST_ALONE(a_last_resort_ends_the_process, kEndedStatus) {
  const LastResort end(kExpires, "the time has passed");
  Forever();
}

class Polled : public Watched {
 public:
  bool Poll() override {
    ++polls;
    return true;
  }
  std::atomic<int> polls{0};
};

TEST(the_watch_polls) {
  const auto polled = std::make_shared<Polled>();
  CHECK_OK(Watch(polled, 0.2));
  WakeWatchdog();
  CHECK_TRUE(Until([&] { return polled->polls > 2; }));
  Unwatch(*polled);
}

TEST(locks_and_conditions_are_waited_for_no_longer_than_asked) {
  TimedMutex held;
  held.lock();
  Event passed;
  std::thread other([&] {
    CHECK_TRUE(!held.try_lock_for(std::chrono::milliseconds(1)));
    Mutex mutex;
    ConditionVariable never;
    MutexLock lock(mutex);
    never.WaitFor(mutex, std::chrono::milliseconds(1));
    passed.Set();
  });
  CHECK_TRUE(passed.Wait());
  held.unlock();
  other.join();
}

#endif

}  // namespace
}  // namespace jaxcomm::testing
