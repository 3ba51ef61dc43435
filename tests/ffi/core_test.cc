// The parts of ffi/core: what is kept of call sites and communicators, and the thread
// that polls. Where ranks meet: local_test.cc.
#include <algorithm>
#include <cstddef>
#include <functional>

#include "ffi/core/derived_cache.h"
#include "ffi/core/last_resort.h"
#include "ffi/core/registry.h"
#include "ffi/core/watchdog.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

std::unique_ptr<CallSite> Site() { return FloatSite("all_reduce", {}, 1); }
ErrorOr<int> Fail() { return FailedPrecondition("not yet"); }
ErrorOr<int> Seven() { return 7; }

TEST(what_could_not_be_made_of_a_site_is_asked_for_again) {
  DerivedCache<int> cache;
  const auto site = Site(), other = Site();
  CHECK_FAILS(cache.Find(*site, Fail).status(), "not yet");
  const int* const made = Must(cache.Find(*site, Seven));
  CHECK_EQ(*made, 7);
  CHECK_TRUE(Must(cache.Find(*site, Fail)) == made);
  CHECK_TRUE(cache.Find(*other, Fail).has_error());
}

TEST(ended_sites_leave_nothing_behind_and_what_others_made_stays) {
  DerivedCache<int> cache;
  const auto site = Site();
  const int* const made = Must(cache.Find(*site, Seven));
  size_t most = 0;
  for (int i = 0; i < 1000; ++i) {
    Must(cache.Find(*Site(), Seven));
    most = std::max(most, cache.size());
  }
  CHECK_TRUE(most < 40);
  CHECK_TRUE(Must(cache.Find(*site, Fail)) == made);
}

// A communicator that does nothing.
class Idle final : public Communicator {
 public:
  explicit Idle(int64_t key) : Communicator(SpecOf(key)) {}
  void Abort(const Status&) override { on_abort(); }
  std::vector<int64_t> FailedRuns() const override { return failed_runs; }
  CommunicatorStats stats() const override { return {}; }

  std::function<void()> on_abort = [] {};
  std::vector<int64_t> failed_runs;

 private:
  static CommunicatorSpec SpecOf(int64_t key) {
    CommunicatorSpec spec = Spec({{0}});
    spec.key = key;
    return spec;
  }
};

std::unique_ptr<CallSite> SiteOf(int64_t key) {
  CallSite::Attributes attributes;
  attributes.key = key;
  return std::make_unique<CallSite>(attributes, *FindCollective("all_reduce"));
}

TEST(a_site_never_finds_a_communicator_that_was_closed) {
  Registry& registry = Registry::Get();
  const auto site = SiteOf(11);
  int64_t run = 0;
  const auto add = [&] {
    auto made = std::make_shared<Idle>(11);
    CHECK_OK(registry.Add(made));
    for (int call = 0; call < 3; ++call) {
      CHECK_TRUE(Must(registry.Find(*site, ++run)) == made);
    }
    return made;
  };
  // Nobody looks between two of them.
  for (int i = 0; i < 3; ++i) {
    std::weak_ptr<Idle> alive = add();
    CHECK_OK(registry.Remove(11));
    CHECK_TRUE(alive.expired());  // what a site remembers keeps nothing alive
  }
  const auto open = add();
  CHECK_OK(registry.Remove(11));
  CHECK_FAILS(registry.Find(*site, ++run).status(), "closed or was never created");
  // Other ranks of this run find none either, even if there is one by now.
  const int64_t failed = run;
  add();
  CHECK_FAILS(registry.Find(*site, failed).status(), "closed or was never created");
  CHECK_OK(registry.Remove(11));
}

TEST(a_run_that_failed_finds_nothing_though_its_site_has_found_the_next) {
  Registry& registry = Registry::Get();
  const auto site = SiteOf(12);
  const auto first = std::make_shared<Idle>(12), next = std::make_shared<Idle>(12);
  first->failed_runs = {7};
  first->on_abort = [&] {
    CHECK_OK(registry.Add(next));
    CHECK_TRUE(Must(registry.Find(*site, 8)) == next);
  };
  CHECK_OK(registry.Add(first));
  CHECK_TRUE(Must(registry.Find(*site, 7)) == first);
  CHECK_OK(registry.Remove(12));
  CHECK_FAILS(registry.Find(*site, 7).status(), "closed or was never created");
  CHECK_TRUE(Must(registry.Find(*site, 9)) == next);
  CHECK_OK(registry.Remove(12));
}

// The system gives the id of a thread that has ended to another.
TEST(a_thread_does_not_go_on_with_the_program_of_one_that_has_ended) {
  CallSite::Attributes attributes;
  attributes.program = 13;
  const auto tag_of_its_only_site = [&](bool lowers) {
    uint64_t tag = 0;
    std::thread([&] {
      if (lowers) BeginProgram(attributes.program);
      tag = CallSite(attributes, *FindCollective("all_reduce")).shared_tag();
    }).join();
    return tag;
  };
  const uint64_t tag = tag_of_its_only_site(true);
  CHECK_EQ(tag_of_its_only_site(false), tag);
  CHECK_EQ(tag_of_its_only_site(true), tag);
}

class Counted final : public Watched {
 public:
  bool Poll() override {
    is_polled = true;
    ++polls;
    if (hangs) CHECK_TRUE(goes_on.Wait());
    is_polled = false;
    return has_work;
  }
  double poll_seconds() const override { return seconds; }
  const char* stuck_text() const override { return "it is stuck"; }
  bool HasPolls(int wanted) const {
    return Until([&] { return polls >= wanted; });
  }

  std::atomic<int> polls{0};
  std::atomic<bool> has_work{false}, hangs{false}, is_polled{false};
  Event goes_on;
  double seconds = kHangSeconds;
};

std::shared_ptr<Counted> MakeWatched(double period = kWatchSeconds) {
  auto made = std::make_shared<Counted>();
  CHECK_OK(Watch(made, period));
  return made;
}

TEST(a_watch_polls_who_has_work_and_others_when_woken_only) {
  auto busy = MakeWatched(), idle = MakeWatched(), rarely = MakeWatched(1000);
  busy->has_work = rarely->has_work = true;
  WakeWatchdog();
  CHECK_TRUE(busy->HasPolls(5));
  CHECK_EQ(idle->polls.load(), 1);
  CHECK_EQ(rarely->polls.load(), 1);
  // A wake does not hurry those that are polled anyway.
  WakeWatchdog();
  CHECK_TRUE(idle->HasPolls(2));
  CHECK_TRUE(busy->HasPolls(busy->polls + 5));
  CHECK_EQ(rarely->polls.load(), 1);
}

TEST(a_wake_during_a_poll_is_not_lost) {
  auto slow = MakeWatched();
  slow->hangs = true;
  WakeWatchdog();
  CHECK_TRUE(slow->HasPolls(1));
  WakeWatchdog();
  slow->goes_on.Set();
  CHECK_TRUE(slow->HasPolls(2));
}

TEST(unwatch_waits_for_a_poll_in_progress) {
  auto slow = MakeWatched();
  slow->hangs = slow->has_work = true;
  WakeWatchdog();
  CHECK_TRUE(slow->HasPolls(1));
  std::atomic<bool> unwatched{false};
  int polls = 0;
  std::thread other([&] {
    Unwatch(*slow);
    CHECK_TRUE(!slow->is_polled);
    polls = slow->polls;
    unwatched = true;
  });
  LetOthersRun();
  CHECK_TRUE(!unwatched);
  slow->goes_on.Set();
  other.join();
  // It is neither polled nor kept.
  CHECK_TRUE(Until([&] { return slow.use_count() == 1; }));
  WakeWatchdog();
  LetOthersRun();
  CHECK_EQ(slow->polls.load(), polls);
}

TEST_ALONE(a_poll_that_hangs_ends_the_process, kEndedStatus) {
  auto stuck = MakeWatched();
  stuck->seconds = kExpires;
  stuck->hangs = true;
  WakeWatchdog();
  Forever();
}

}  // namespace
}  // namespace jaxcomm::testing
