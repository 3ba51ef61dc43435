#include "ffi/core/watchdog.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "ffi/core/last_resort.h"
#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

using std::chrono::milliseconds;

class Counted final : public Watched {
 public:
  bool Poll() override {
    is_polled = true;
    ++polls;
    while (hangs) std::this_thread::sleep_for(milliseconds(1));
    is_polled = false;
    return has_work;
  }
  double poll_seconds() const override { return seconds; }
  const char* stuck_text() const override { return "it is stuck"; }

  std::atomic<int> polls{0};
  std::atomic<bool> has_work{false}, hangs{false}, is_polled{false};
  double seconds = 60;
};

std::shared_ptr<Counted> MakeWatched(double period = kWatchSeconds) {
  auto made = std::make_shared<Counted>();
  CHECK_TRUE(Watch(made, period).success());
  return made;
}

TEST(polls_while_there_is_work) {
  auto busy = MakeWatched();
  auto idle = MakeWatched();
  busy->has_work = true;
  WakeWatchdog();
  CHECK_TRUE(Comes([&] { return busy->polls > 3; }));
  const int polls = idle->polls;
  busy->has_work = false;
  CHECK_TRUE(polls >= 1);
  WakeWatchdog();
  CHECK_TRUE(Comes([&] { return idle->polls > polls; }));
}

TEST(idle_ones_are_polled_when_woken_only) {
  auto idle = MakeWatched();
  WakeWatchdog();
  CHECK_TRUE(Comes([&] { return idle->polls == 1; }));
  std::this_thread::sleep_for(milliseconds(50));
  CHECK_EQ(idle->polls.load(), 1);
}

TEST(each_has_a_period_of_its_own) {
  auto often = MakeWatched();
  auto rarely = MakeWatched(1000);
  often->has_work = rarely->has_work = true;
  WakeWatchdog();
  CHECK_TRUE(Comes([&] { return often->polls > 5; }));
  CHECK_EQ(rarely->polls.load(), 1);
  // A wake does not hurry communicators that are polled anyway.
  WakeWatchdog();
  CHECK_TRUE(Comes([&] { return often->polls > 10; }));
  CHECK_EQ(rarely->polls.load(), 1);
}

TEST(a_wake_during_a_poll_is_not_lost) {
  auto slow = MakeWatched();
  slow->hangs = true;
  WakeWatchdog();
  CHECK_TRUE(Comes([&] { return slow->polls == 1; }));
  WakeWatchdog();
  slow->hangs = false;
  CHECK_TRUE(Comes([&] { return slow->polls == 2; }));
}

TEST(unwatch_waits_for_a_poll_in_progress) {
  auto slow = MakeWatched();
  slow->hangs = slow->has_work = true;
  WakeWatchdog();
  CHECK_TRUE(Comes([&] { return slow->polls == 1; }));
  std::atomic<bool> calls{false}, unwatched{false};
  int polls = 0;
  std::thread other([&] {
    calls = true;
    Unwatch(*slow);
    CHECK_TRUE(!slow->is_polled);
    polls = slow->polls;
    unwatched = true;
  });
  CHECK_TRUE(Comes([&] { return calls.load(); }));
  std::this_thread::sleep_for(milliseconds(20));
  CHECK_TRUE(!unwatched);
  slow->hangs = false;
  other.join();
  // It is neither polled nor kept.
  CHECK_TRUE(Comes([&] { return slow.use_count() == 1; }));
  WakeWatchdog();
  std::this_thread::sleep_for(milliseconds(20));
  CHECK_EQ(slow->polls.load(), polls);
}

TEST_ALONE(a_poll_that_hangs_ends_the_process, kEndedStatus) {
  auto stuck = MakeWatched();
  stuck->seconds = 0.05;
  stuck->hangs = true;
  WakeWatchdog();
  std::this_thread::sleep_for(std::chrono::seconds(30));
}

}  // namespace
}  // namespace jaxcomm::testing
