// Tests which error a failure gives to the members of a crossing, and to everybody that
// shares memory with them.
#include <cmath>
#include <condition_variable>
#include <future>
#include <mutex>

#include "ffi/backends/host/arena/arena.h"
#include "ffi/backends/host/arena/deadlock.h"
#include "ffi/backends/host/arena/process_set.h"
#include "ffi/core/registry.h"
#include "ffi/os/start_thread.h"
#include "tests/ffi/processes.h"

namespace jaxcomm::testing {
namespace {

constexpr char kRefused[] =
    "refused, since a collective has failed in process 1, and processes may be out of "
    "step. Call jaxcomm.finalize(), then jaxcomm.init(), in every process";
constexpr char kMismatch[] =
    "The first failure: a rank of process 1 called all_reduce(float32[4])";

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
  for (int rank : {0, 1}) CHECK_CONTAINS(next.End(rank), kMismatch);
  return rung;
}

#ifndef __SANITIZE_THREAD__  // it has a thread of its own, which sleeps
TEST_ALONE(what_ends_in_another_set_may_wake_a_process_that_stands_still,
           EXIT_SUCCESS) {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_over = false;
  std::thread looks = Must(StartThread(
      [&] {
        const Grace grace = Grace::OfThisProcess();
        ++WaitsOfProcess();
        CHECK_TRUE(Until([&] { return grace.stands_still(1); }));
        ++WaitsOfProcess();
        CHECK_TRUE(!grace.stands_still(1));
        CHECK_TRUE(grace.stands_still(2));
        std::lock_guard<std::mutex> lock(mutex);
        is_over = true;
        changed.notify_all();
      },
      "jaxcomm-test"));
  {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_over; });
  }
  looks.join();
}
#endif

TEST(processes_that_wait_in_what_comes_next_hear_of_a_mismatch_at_once) {
  bool rung = false;
  for (int trial = 0; trial < 20 && !rung; ++trial) rung = IsRungByMismatch();
  CHECK_TRUE(rung);
}

TEST(after_a_failure_all_that_share_memory_are_refused) {
  // Processes 0 and 1 disagree. Process 0 had its result: it is a call ahead.
  Processes processes(Blocks(3, 1));
  Calls send(processes, "permute", {-1, 0, -1}, 4, 1);
  Calls sum(processes, "all_reduce", {}, 4, 1);
  Calls waits(processes, "all_reduce", {}, 4, 1, /*tag=*/2);
  send.Begin(0);
  CHECK_EQ(send.End(0), "");
  waits.Begin(2);
  sum.Begin(1);
  CHECK_CONTAINS(sum.End(1), "where the ranks before it called permute(float32[4])");
  // Whoever waits elsewhere, at once; then everybody, each time and at once.
  CHECK_CONTAINS(waits.End(2), kRefused);
  for (int run : {2, 3}) {
    Calls next(processes, "all_reduce", {}, 8, run);
    for (int rank : {0, 1, 2}) {
      next.Begin(rank);
      const std::string text = next.End(rank);
      CHECK_CONTAINS(text, StrCat("rank ", rank, " of 3 (cpu:10", rank));
      CHECK_CONTAINS(text, kRefused);
      CHECK_CONTAINS(text, kMismatch);
    }
  }
  // Memory that they agree on anew knows nothing of it.
  Processes anew(Blocks(3, 1));
  Calls right(anew, "all_reduce", {}, 4, 1);
  right.BeginAll();
  right.EndAll();
}

TEST(a_failure_within_a_process_is_told_to_the_others) {
  // Ranks 0 and 1 are of process 0. Their program fails before it comes to what rank 2
  // waits in: its next run would meet that.
  Processes processes({0, 0, 1});
  Calls sum(processes, "all_reduce", {}, 4, 1);
  sum.Begin(2);
  processes.of(0).EndRun(1, FailedPrecondition("not what the program says"));
  const std::string text = sum.End(2);
  CHECK_CONTAINS(text, "rank 2 of 3 (cpu:102, process 1): refused");
  CHECK_CONTAINS(text, "failed in process 0, and");
  CHECK_CONTAINS(text, "The first failure: not what the program says");
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
  CHECK_CONTAINS(barrier.End(1), "failed in process 0, and processes may be out of");
}

TEST(processes_that_wait_for_each_other_are_told_once_both_stand_still) {
  const std::vector<std::pair<std::string, std::vector<int64_t>>> kinds = {
      {"all_reduce", {}}, {"permute", {1, 0}}, {"barrier", {}}};
  for (const auto& [collective, params] : kinds) {
    for (const int64_t elements : {4, 100000}) {
      std::atomic<bool> still[2] = {false, false};
      Processes processes(Blocks(2, 1), kHangSeconds, {}, [&](int process) {
        return Grace{0, [&still, process](size_t) { return still[process].load(); }};
      });
      const auto look = [&] {
        for (int process : {0, 1}) processes.set(process)->arena().RingSelf();
        LetOthersRun();
      };
      Calls first(processes, "all_reduce", {}, elements, 1);
      Calls second(processes, collective, params, collective == "barrier" ? 0 : 4, 1,
                   2);
      first.Begin(0);
      second.Begin(1);
      // While one of them may come, nobody is told.
      // The first of those that stand still tells: it did not stand still before.
      for (int process : {1, 0}) {
        still[1 - process] = false;
        look();
        CHECK_TRUE(Until([&] {  // whoever goes on takes back that it stood still
          return !processes.set(0)->arena().process(1 - process).stands_still.load();
        }));
        if (Failures() > 0) return;
        still[process] = true;
        // The first time, perhaps before the other has said what it lacks.
        look();
        look();
        CHECK_TRUE(!first.outcomes[0].done() && !second.outcomes[1].done());
      }
      still[1] = true;
      look();
      const std::string told = first.End(0);
      CHECK_CONTAINS(told, "s for rank 1. Process 1 waits in " + collective + "(");
      CHECK_CONTAINS(told, " instead. Each waits there for another one");
      CHECK_CONTAINS(second.End(1), "failed in process 0, and processes may be out of");
    }
  }
}

TEST(a_process_that_dies_at_the_first_use_of_any_operation_is_named) {
  for (const Use& use : UsesOfTwo(0)) {
    for (const int64_t times : {1, 20000}) {  // small ones, and streams
      Child child;
      Processes processes(Blocks(2, 1), kHangSeconds,
                          {PeerOf(child.pid(), 0), PeerOf(getpid(), 1)});
      const auto site = use.MakeSite(times);
      RankBuffers survivor(use.operand * times, use.result * times, 0);
      Outcome outcome;
      survivor.Arrive(processes.of(1), site.get(), 1, 101, &outcome);
      child.Kill();
      const std::string text = outcome.Wait();
      CHECK_CONTAINS(text, StrCat(use.collective, "(float32["));
      CHECK_CONTAINS(text, "waited for rank 0, gone with process 0 (pid ");
      CHECK_CONTAINS(text, "which died.");
    }
  }
}

TEST(an_interrupt_ends_a_wait_for_another_process) {
  Processes processes(Blocks(2, 1));
  Calls sum(processes, "all_reduce", {}, 4, 1);
  sum.Begin(0);
  processes.of(0).Interrupt();
  CHECK_CONTAINS(sum.End(0), "interrupted: all_reduce(float32[4])");
  // The other is told what to do.
  sum.Begin(1);
  CHECK_CONTAINS(sum.End(1), "Call jaxcomm.finalize(), then jaxcomm.init()");
}

// Each takes two transfers or one: the first of any call is where they meet.
TEST(a_call_that_reads_operands_and_one_that_does_not_differ_at_once) {
  Processes processes(Blocks(2, 1));
  const Leaf three{DataType::S32, {3}, 3, 4};
  const auto check = MakeSite("check_positions", {}, {three}, {three});
  Calls sum(processes, "all_reduce", {}, 4, 1);
  const std::vector<int32_t> right = {-1, 0, 0};
  const void* operands[] = {right.data()};
  void* results[] = {const_cast<int32_t*>(right.data())};
  Outcome outcome;
  outcome.Watch(processes.of(0).Execute(
      Call{check.get(), 1, 1, 1, 100, operands, results, nullptr}));
  sum.Begin(1);
  CHECK_CONTAINS(sum.End(1), "where the ranks before it called check_positions");
  CHECK_CONTAINS(outcome.Wait(), "called all_reduce(float32[4])");
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

// A transfer of process 0 that sums floats of ranks in some processes.
struct Lone {
  Lone(ProcessSet& set, const std::vector<int>& process_of, uint64_t tag,
       double timeout_seconds)
      : set(set) {
    plan = Must(MakeHostPlan(*site, 2, nullptr));
    stream = MakeStreamPlan(plan, site->results(), process_of, 0);
    request.key = {1, 2, 3, tag};
    for (int process : process_of) request.members |= uint64_t{1} << process;
    pending.describe = [](uint64_t, Hindrance) { return "by the test"; };
    pending.timeout_seconds = timeout_seconds;  // it began long ago
    pending.warns = false;
  }
  void Begin(std::function<void()> done) {
    transfer.Begin(&set.arena(), request, stream,
                   {&plan, &site->results(), ReduceOp::kSum, nullptr, nullptr});
    pending.transfer = &transfer;
    pending.done = std::move(done);
    set.Continue(pending);
  }

  ProcessSet& set;
  std::unique_ptr<CallSite> site = FloatSite("all_reduce", {}, 0);
  HostPlan plan;
  StreamPlan stream;
  CrossingRequest request;
  Transfer transfer;
  PendingTransfer pending;
};

TEST(a_timeout_passes_though_other_transfers_move_all_the_time) {
  const auto set = std::make_shared<ProcessSet>(MakeSegment(2), Unwatched(2), 0);
  Lone waiting(*set, {0, 1}, 1, kAtOnce), busy(*set, {0, 0}, 2, INFINITY);
  Event expired, ended;
  // It needs nobody else, and begins anew whenever it ends.
  const std::function<void()> again = [&] {
    expired.is_set() ? ended.Set() : busy.Begin(again);
  };
  busy.Begin(again);
  waiting.Begin([&] { expired.Set(); });
  CHECK_TRUE(expired.Wait());
  CHECK_TRUE(ended.Wait());
  CHECK_FAILS(waiting.transfer.status(), "by the test");
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
