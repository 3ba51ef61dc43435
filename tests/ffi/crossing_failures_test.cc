// Tests which error a failure gives to the members of a crossing, also to members that
// had gone on.
#include <future>

#include "ffi/backends/host/arena/arena.h"
#include "ffi/backends/host/arena/process_set.h"
#include "ffi/core/registry.h"
#include "tests/ffi/processes.h"

namespace jaxcomm::testing {
namespace {

constexpr char kHadEnded[] = "failed in others: a rank of process 1 called";

// Whether process 0 is rung. One that does not sleep yet looks by itself, and after 30
// s it looks anyway.
bool IsRungByMismatch() {
  Processes processes(Blocks(3, 1));
  Calls send(processes, "permute", {-1, 0, -1}, 4, 1);
  Calls sum(processes, "all_reduce", {}, 4, 1);
  Calls next(processes, "all_reduce", {}, 8, 1, /*tag=*/2);
  send.Begin(0);
  CHECK_EQ(send.End(0), "");
  next.Begin(0);
  next.Begin(1);
  // Their threads sleep by then; the one that finds out is among them.
  for (int i = 0; i < 5; ++i) LetOthersRun();
  const Doorbell& doorbell = processes.set(0)->arena().process(0).doorbell;
  const uint32_t before = doorbell.rings();
  sum.Begin(1);
  const bool rung = doorbell.rings() > before;
  CHECK_CONTAINS(sum.End(1), "permute(float32[4])");
  for (int rank : {0, 1}) CHECK_CONTAINS(next.End(rank), kHadEnded);
  return rung;
}

TEST(processes_that_wait_in_what_comes_next_hear_of_a_mismatch_at_once) {
  bool rung = false;
  for (int trial = 0; trial < 20 && !rung; ++trial) rung = IsRungByMismatch();
  CHECK_TRUE(rung);
}

TEST(who_had_gone_on_hears_of_a_mismatch_in_its_own_group_once) {
  // Process 0 has a rank in two groups; process 1 calls something else in the first.
  const auto segment = MakeSegment(3);
  std::vector<std::shared_ptr<Communicator>> of;
  for (int process = 0; process < 3; ++process) {
    of.push_back(MakeLocalCommunicator(SpecOf(
        segment, Unwatched(3), process, {{100, 101}, {102, 103}}, {{0, 1}, {0, 2}})));
  }
  struct Arrival {
    RankBuffers buffers{8, 8, 1};
    Outcome outcome;
  };
  Site send("permute", {-1, 0}, 4, 3), sum("all_reduce", {}, 4, 3);
  Site next("all_reduce", {}, 8, 3);
  Arrival a, b, mine[2], others[2], then[2];
  const auto call = [&](Site& site, int process, int device, int run,
                        Arrival* arrival) {
    arrival->buffers.Arrive(*of[process], site.of[process].get(), run, device,
                            &arrival->outcome);
  };
  call(send, 0, 100, 1, &a);
  CHECK_EQ(a.outcome.Wait(), "");
  call(sum, 1, 101, 1, &b);
  CHECK_CONTAINS(b.outcome.Wait(), "permute(float32[4])");
  call(next, 0, 102, 2, &others[0]);
  call(next, 2, 103, 2, &others[1]);
  for (Arrival& each : others) CHECK_EQ(each.outcome.Wait(), "");
  call(next, 0, 100, 2, &mine[0]);
  call(next, 1, 101, 2, &mine[1]);
  for (Arrival& each : mine) {
    const std::string text = each.outcome.Wait();
    CHECK_CONTAINS(text, "all_reduce(float32[8])");
    CHECK_CONTAINS(text, kHadEnded);
    CHECK_CONTAINS(text, "permute(float32[4])");
  }
  // All have heard: what comes then is not touched.
  call(next, 0, 100, 3, &then[0]);
  call(next, 1, 101, 3, &then[1]);
  for (Arrival& each : then) CHECK_EQ(each.outcome.Wait(), "");
}

// How long it waited, and who comes too late: tests/faults/test_disagreement.py.
TEST(a_timeout_says_what_the_missing_processes_do_instead) {
  Processes processes(Blocks(3, 1), kExpires);
  Calls sum(processes, "all_reduce", {}, 4, 1);
  Calls barrier(processes, "barrier", {}, 0, 1, /*tag=*/2);
  // It waits there before the time of the other begins.
  barrier.Begin(1);
  sum.Begin(0);
  const std::string text = sum.End(0);
  CHECK_CONTAINS(text, " s for ranks 1, 2. ");
  CHECK_CONTAINS(text, "over axes ('x',) instead");
  CHECK_CONTAINS(text, "Process 1 waits in barrier(");
  CHECK_CONTAINS(text, "has called nothing yet");
  CHECK_TRUE(!barrier.outcomes[1].done());
  processes.of(1).Abort(FailedPrecondition("closed by the test"));
  CHECK_CONTAINS(barrier.End(1), "closed by the test");
}

TEST(a_forked_child_leaves_what_is_its_parent_s) {
  Processes processes(Blocks(2, 1));
  CHECK_EQ(Child([&] { processes.communicators.clear(); }).Wait(), EXIT_SUCCESS);
  // No other process sees that this one has left.
  for (int process : {0, 1}) {
    CHECK_EQ(processes.set(0)->arena().process(process).presence.load(),
             uint32_t{ProcessState::kAttached});
  }
  Calls sum(processes, "all_reduce", {}, 4, 1);
  sum.BeginAll();
  sum.EndAll();
}

TEST(a_forked_child_does_not_take_its_parent_s_seat) {
  Processes processes(Blocks(2, 1));
  CHECK_OK(Registry::Get().Add(processes.communicators[0]));
  Calls sum(processes, "all_reduce", {}, 4, 1);
  sum.Begin(1);
  const auto find = [&] { return Registry::Get().Find(*sum.site.of[0], 1).status(); };
  CHECK_OK(find());  // remembered by the site
  Child child([&] {
    const std::string text = TextOf(find());
    CHECK_CONTAINS(text, "all_reduce(float32[4]) over axes ('x',): process ");
    CHECK_CONTAINS(text, StrCat("was forked from process ", getppid()));
    CHECK_CONTAINS(text, "\"spawn\"");
  });
  CHECK_EQ(child.Wait(), EXIT_SUCCESS);
  CHECK_OK(find());
  sum.Begin(0);
  sum.EndAll();
  CHECK_EQ(sum.buffers[1].result[0], 1.0f);  // 0 + 1
  CHECK_OK(Registry::Get().Remove(1));
}

TEST(closing_ends_a_crossing_that_its_handler_still_steps) {
  // It does for 100 us; others are to come at any time of that.
  for (int trial = 0; trial < 60; ++trial) {
    Processes processes(Blocks(2, 1));
    Calls sum(processes, "all_reduce", {}, 4, 1);
    std::thread rank([&] { sum.Begin(0); });
    CHECK_TRUE(Until([&] { return processes.of(0).stats().bytes != 0; }));
    for (volatile int spin = 0; spin < trial % 20 * 5000;) spin = spin + 1;
    processes.of(0).Abort(FailedPrecondition("closed by the test"));
    CHECK_CONTAINS(sum.End(0), "closed by the test");
    rank.join();
    if (Failures() > 0) return;
  }
}

TEST(destroying_a_communicator_is_nothing_to_the_next_one) {
  // The next one is often made where the destroyed one was. Under AddressSanitizer,
  // which keeps freed memory for long, it never is; then this shows nothing.
  Processes processes(Blocks(2, 1));
  CommunicatorSpec spec = Spec({{100, 101}});
  spec.key = 2;
  spec.process_set = processes.set(0);
  spec.processes = {{0, 1}};
  // Meanwhile the progress thread is busy.
  std::promise<void> begun, release;
  Transfer nothing;  // is done
  PendingTransfer busy;
  busy.transfer = &nothing;
  busy.done = [&begun, released = release.get_future().share()] {
    begun.set_value();
    released.wait();
  };
  spec.process_set->Continue(busy);
  begun.get_future().wait();
  // Not watched for timeouts: the watchdog keeps the memory for up to a second.
  auto first = std::make_shared<LocalCommunicator>(spec);
  const LocalCommunicator* const place = first.get();
  first = nullptr;
  std::shared_ptr<LocalCommunicator> second;
  for (int attempt = 0; attempt < 100 && second.get() != place; ++attempt) {
    second = nullptr;
    second = std::make_shared<LocalCommunicator>(spec);
  }
  Site site("all_reduce", {}, 4, 2);
  RankBuffers a(4, 4, 1), b(4, 4, 2);
  Outcome outcome_a, outcome_b;
  a.Arrive(*second, site.of[0].get(), 1, 100, &outcome_a);
  release.set_value();
  LetOthersRun();
  CHECK_TRUE(!outcome_a.done());
  CommunicatorSpec peer = spec;
  peer.process_set = processes.set(1);
  const auto other = MakeLocalCommunicator(peer);
  b.Arrive(*other, site.of[1].get(), 1, 101, &outcome_b);
  CHECK_EQ(outcome_a.Wait(), "");
  CHECK_EQ(outcome_b.Wait(), "");
}

}  // namespace
}  // namespace jaxcomm::testing
