// Tests which error a failure gives to the members of a crossing, also to members that
// had gone on.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/backends/host/arena.h"
#include "ffi/backends/host/process_set.h"
#include "tests/ffi/check.h"
#include "tests/ffi/processes.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

struct Pair {
  explicit Pair(int64_t n) : a(n, n, 1), b(n, n, 2) {}
  RankBuffers a, b;
  Outcome outcome_a, outcome_b;
};

TEST(another_signature_is_an_error_on_both_with_both_signatures) {
  Processes processes(Blocks(2, 1));
  Site four("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 1);
  Site eight("all_reduce", {}, {FloatLeaf(8)}, {FloatLeaf(8)}, 1);
  Pair pair(8);
  pair.a.Arrive(processes.of(0), four.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
  pair.b.Arrive(processes.of(1), eight.of[0].get(), 1, 101, nullptr, &pair.outcome_b);
  for (Outcome* outcome : {&pair.outcome_a, &pair.outcome_b}) {
    const std::string text = outcome->Wait();
    CHECK_CONTAINS(text, "all_reduce(float32[4])");
    CHECK_CONTAINS(text, "all_reduce(float32[8])");
  }
  // The next run is not touched.
  Site good("all_reduce", {}, {FloatLeaf(8)}, {FloatLeaf(8)}, 2);
  Pair next(8);
  next.a.Arrive(processes.of(0), good.of[0].get(), 2, 100, nullptr, &next.outcome_a);
  next.b.Arrive(processes.of(1), good.of[1].get(), 2, 101, nullptr, &next.outcome_b);
  CHECK_EQ(next.outcome_a.Wait(), "");
  CHECK_EQ(next.outcome_b.Wait(), "");
  CHECK_EQ(next.a.result[7], 3.0f);
}

constexpr char kHadEnded[] = "failed in others: a rank of process 1 called";

TEST(processes_that_had_gone_on_hear_of_a_mismatch_in_what_comes_next) {
  // Processes 0 and 2 are done with it; process 1 calls something else.
  Processes processes(Blocks(3, 1));
  Calls send(processes, "permute", {-1, 0, -1}, 4, 1);
  Calls sum(processes, "all_reduce", {}, 4, 1);
  for (int rank : {0, 2}) send.Begin(rank);
  for (int rank : {0, 2}) CHECK_EQ(send.End(rank), "");
  sum.Begin(1);
  CHECK_CONTAINS(sum.End(1), "permute(float32[4])");
  Calls next(processes, "all_reduce", {}, 8, 2);
  next.BeginAll();
  for (int rank : {0, 1, 2}) {
    const std::string text = next.End(rank);
    CHECK_CONTAINS(text, "all_reduce(float32[8])");
    CHECK_CONTAINS(text, kHadEnded);
    CHECK_CONTAINS(text, "permute(float32[4])");
  }
  // All have heard: what comes then is not touched.
  Calls then(processes, "all_reduce", {}, 8, 3);
  then.BeginAll();
  for (int rank : {0, 1, 2}) CHECK_EQ(then.End(rank), "");
}

TEST(processes_that_wait_in_what_comes_next_hear_of_a_mismatch_at_once) {
  Processes processes(Blocks(3, 1));
  Calls send(processes, "permute", {-1, 0, -1}, 4, 1);
  Calls sum(processes, "all_reduce", {}, 4, 1);
  Calls next(processes, "all_reduce", {}, 8, 1, /*tag=*/2);
  send.Begin(0);
  CHECK_EQ(send.End(0), "");
  next.Begin(0);
  next.Begin(1);
  // Their threads sleep by then; the one that finds out is among them.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const auto begin = std::chrono::steady_clock::now();
  sum.Begin(1);
  CHECK_CONTAINS(sum.End(1), "permute(float32[4])");
  for (int rank : {0, 1}) CHECK_CONTAINS(next.End(rank), kHadEnded);
  // They would look up by themselves after 30 s.
  CHECK_TRUE(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
}

TEST(a_mismatch_in_one_group_is_nothing_to_another) {
  // Process 0 has a rank in two groups; process 1 calls something else in the first.
  const auto segment = Must(Segment::Create(Arena::Bytes(3), false));
  Arena::Format(*segment);
  const std::vector<Peer> peers = {{0, 0, 0}, {0, 0, 1}, {0, 0, 2}};
  std::vector<std::shared_ptr<Communicator>> of;
  for (int process = 0; process < 3; ++process) {
    CommunicatorSpec spec = Spec({{100, 101}, {102, 103}}, 60);
    spec.process_set = std::make_shared<ProcessSet>(segment, peers, process);
    spec.processes = {{0, 1}, {0, 2}};
    of.push_back(MakeLocalCommunicator(std::move(spec)));
  }
  Site send("permute", {-1, 0}, {FloatLeaf(4)}, {FloatLeaf(4)}, 3);
  Site sum("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 3);
  Site next("all_reduce", {}, {FloatLeaf(8)}, {FloatLeaf(8)}, 3);
  const auto call = [&](Site& site, int process, int device, int run,
                        RankBuffers* buffers, Outcome* outcome) {
    buffers->Arrive(*of[process], site.of[process].get(), run, device, nullptr,
                    outcome);
  };
  Pair first(4), mine(8), others(8);
  call(send, 0, 100, 1, &first.a, &first.outcome_a);
  CHECK_EQ(first.outcome_a.Wait(), "");
  call(sum, 1, 101, 1, &first.b, &first.outcome_b);
  CHECK_CONTAINS(first.outcome_b.Wait(), "permute(float32[4])");
  call(next, 0, 102, 2, &others.a, &others.outcome_a);
  call(next, 2, 103, 2, &others.b, &others.outcome_b);
  CHECK_EQ(others.outcome_a.Wait(), "");
  CHECK_EQ(others.outcome_b.Wait(), "");
  call(next, 0, 100, 2, &mine.a, &mine.outcome_a);
  call(next, 1, 101, 2, &mine.b, &mine.outcome_b);
  CHECK_CONTAINS(mine.outcome_a.Wait(), kHadEnded);
  CHECK_CONTAINS(mine.outcome_b.Wait(), kHadEnded);
}

TEST(a_process_that_never_comes_is_named_at_the_deadline) {
  Processes processes(Blocks(3, 1), /*timeout_seconds=*/0.3);
  Site site("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 3);
  Site other("barrier", {}, {}, {}, 1);
  Pair pair(4);
  // It waits there before the time of the other begins.
  pair.b.Arrive(processes.of(1), other.of[0].get(), 1, 101, nullptr, &pair.outcome_b,
                /*tag=*/2);
  pair.a.Arrive(processes.of(0), site.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
  const std::string text = pair.outcome_a.Wait();
  CHECK_CONTAINS(text, "all_reduce(float32[4]) over axes ('x',)");
  // It says how long it really was.
  const size_t waited = std::min(text.find("waited "), text.size());
  CHECK_TRUE(std::strtod(text.c_str() + std::min(waited + 7, text.size()), nullptr) >=
             0.3);
  CHECK_CONTAINS(text, " s for ranks 1, 2. ");
  CHECK_CONTAINS(text, "waits in barrier() over axes ('x',) instead");
  CHECK_CONTAINS(text, "has called nothing yet");
  // A member that comes too late fails at once.
  Outcome late;
  RankBuffers buffers(4, 4, 1);
  buffers.Arrive(processes.of(2), site.of[2].get(), 1, 102, nullptr, &late);
  const std::string told = late.Wait();
  CHECK_CONTAINS(told, "rank 2 of 3");
  CHECK_CONTAINS(told, "came when the others had stopped waiting");
  CHECK_CONTAINS(told, text.substr(waited, text.find(" for ranks 1, 2") - waited));
  CHECK_TRUE(!pair.outcome_b.done());
  processes.of(1).Abort(FailedPrecondition("closed by the test"));
  CHECK_CONTAINS(pair.outcome_b.Wait(), "closed by the test");
}

TEST(a_process_that_leaves_is_an_error_on_those_who_wait) {
  for (int64_t n : {4, 100000}) {
    Processes processes(Blocks(2, 1));
    Site site("all_reduce", {}, {FloatLeaf(n)}, {FloatLeaf(n)}, 2);
    Pair pair(n);
    pair.a.Arrive(processes.of(0), site.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
    processes.communicators[1].reset();
    const std::string text = pair.outcome_a.Wait();
    CHECK_CONTAINS(text, "waited for rank 1, gone with");
    CHECK_CONTAINS(text, "called finalize or exited");
  }
}

TEST(a_process_that_is_killed_is_noticed_at_once) {
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  std::vector<Peer> peers = {PeerOf(getpid(), 0), PeerOf(child, 1)};
  Processes processes(Blocks(2, 1), 60, peers);
  Site site("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 2);
  Pair pair(4);
  pair.a.Arrive(processes.of(0), site.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // asleep by now
  CHECK_TRUE(!pair.outcome_a.done());
  const auto killed = std::chrono::steady_clock::now();
  kill(child, SIGKILL);
  const std::string text = pair.outcome_a.Wait();
  const auto noticed = std::chrono::steady_clock::now();
  CHECK_CONTAINS(text, "died");
  CHECK_CONTAINS(text, std::to_string(child));
  // The deadline is 60 s away; what counts is that nobody waits for it.
  CHECK_TRUE(noticed - killed < std::chrono::seconds(30));
  waitpid(child, nullptr, 0);
}

TEST(a_forked_child_leaves_what_is_its_parent_s) {
  Processes processes(Blocks(2, 1));
  const pid_t child = fork();
  if (child == 0) {
    processes.communicators.clear();
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  // No other process sees that this one has left, and none of its threads stays busy.
  rusage begin, end;
  const auto clock = std::chrono::steady_clock::now();
  getrusage(RUSAGE_SELF, &begin);
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  getrusage(RUSAGE_SELF, &end);
  const auto slept = std::chrono::steady_clock::now() - clock;
  const auto micros = [](const rusage& of) {
    return of.ru_utime.tv_sec * 1000000 + of.ru_utime.tv_usec +
           of.ru_stime.tv_sec * 1000000 + of.ru_stime.tv_usec;
  };
  // A busy thread has the time that it is given; others sleep for most of it.
  CHECK_TRUE(std::chrono::microseconds(micros(end) - micros(begin)) < slept / 4);
  Calls sum(processes, "all_reduce", {}, 4, 1);
  sum.BeginAll();
  for (int rank : {0, 1}) CHECK_EQ(sum.End(rank), "");
}

TEST(closing_ends_a_crossing_that_its_handler_still_steps) {
  // It does for 100 us; others are to come at any time of that.
  for (int trial = 0; trial < 60; ++trial) {
    Processes processes(Blocks(2, 1), /*timeout_seconds=*/20);
    Calls sum(processes, "all_reduce", {}, 4, 1);
    std::thread rank([&] { sum.Begin(0); });
    while (processes.of(0).stats().bytes == 0) std::this_thread::yield();
    const auto close =
        std::chrono::steady_clock::now() + std::chrono::microseconds(trial % 20 * 5);
    while (std::chrono::steady_clock::now() < close) continue;
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
  CommunicatorSpec spec = Spec({{100, 101}}, 60);
  spec.key = 2;
  spec.process_set = processes.communicators[0]->spec().process_set;
  spec.processes = {{0, 1}};
  // Meanwhile the progress thread is busy.
  std::promise<void> begun, release;
  Transfer nothing;  // is done
  PendingTransfer busy;
  busy.transfer = &nothing;
  busy.begin = std::chrono::steady_clock::now();
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
  Site site("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 2);
  Pair pair(4);
  pair.a.Arrive(*second, site.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
  release.set_value();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_TRUE(!pair.outcome_a.done());
  CommunicatorSpec peer = spec;
  peer.process_set = processes.communicators[1]->spec().process_set;
  const auto other = MakeLocalCommunicator(peer);
  pair.b.Arrive(*other, site.of[1].get(), 1, 101, nullptr, &pair.outcome_b);
  CHECK_EQ(pair.outcome_a.Wait(), "");
  CHECK_EQ(pair.outcome_b.Wait(), "");
}

TEST(closing_a_communicator_ends_its_crossings) {
  Processes processes(Blocks(2, 1));
  Site site("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 2);
  Pair pair(4);
  pair.a.Arrive(processes.of(0), site.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
  processes.of(0).Abort(FailedPrecondition("closed by the test"));
  CHECK_CONTAINS(pair.outcome_a.Wait(), "closed by the test");
}

}  // namespace
}  // namespace jaxcomm::testing
