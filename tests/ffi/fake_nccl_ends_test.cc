// Tests how a process ends whose collectives fail while a device runs them.
#include <sched.h>
#include <unistd.h>

#include <cmath>
#include <string>

#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/backends/nccl/failure/process_failure.h"
#include "ffi/core/last_resort.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

// Two communicators of two devices each: they share resources, or have their own.
// Without rank 1 a call of the first times out.
struct Communicators {
  explicit Communicators(OnFailure on_failure, bool share = false,
                         double seconds_of_second = kHangSeconds,
                         const NcclLibrary& library = Library()) {
    Options options;
    options.on_failure = on_failure;
    options.library = library;
    options.settings = {{{"splitShare", share ? 1 : 0}}, ""};
    const auto shared = MakeWorld(2, library, options.settings);
    world = shared;
    options.timeout = kExpires;
    first = Make(options, shared);
    options.timeout = seconds_of_second;
    second = Make(options, shared);
  }
  std::weak_ptr<NcclWorld> world;
  std::shared_ptr<Communicator> first, second;
};

// The rank waits in vain; the wait for its stream ends with `expected`.
void TimeOut(Communicator& communicator, Psum& sum, cuda::Result expected) {
  CHECK_OK(sum.Enqueue(communicator));
  CHECK_EQ(sum.on.Synchronize(), expected);
}

// What is told then: tests/nccl/test_stopped.py.
TEST_ALONE(nothing_asks_nccl_for_what_stopped_devices_refuse, EXIT_SUCCESS) {
  Communicators two(OnFailure::kRaise);
  Psum waits(0), beside(0);
  TimeOut(*two.first, waits, kStopped);
  CHECK_EQ(waits.result[0], -1.0f);
  CHECK_TRUE(Until([] { return DevicesAreStopped(); }));
  // What fails later is a consequence.
  StopDevices("a later failure", {}, {});
  CHECK_FAILS(DevicesStoppedError(), "not done after 1 s");
  // Whatever else is live has lost its devices as well, and says why.
  const Status refused = beside.Enqueue(*two.second);
  CHECK_FAILS(refused, "the GPUs of this process were stopped");
  CHECK_FAILS(refused, "not done after 1 s");
  two.first = two.second = nullptr;
  CHECK_EQ(Count("ncclCommAbort"), 0);
  CHECK_EQ(Nccl().GroupStart(), nccl::kUnhandledCudaError);
  CHECK_CONTAINS(std::string(Nccl().GetLastError(nullptr)), "Cuda failure 716");
}

// Its thread may be in a host callback, for which XLA ends the process if the device is
// stopped meanwhile.
TEST_ALONE(devices_are_stopped_once_a_late_one_has_come, EXIT_SUCCESS) {
  constexpr double kLong = 5;
  Communicators two(OnFailure::kRaise, /*share=*/false, kLong);
  Psum waits(0), late(1);
  CHECK_OK(waits.Enqueue(*two.second));
  CHECK_TRUE(Until([] { return DevicesAreStopped(); }));
  LetOthersRun();
  CHECK_EQ(Cuda().StreamQuery(late.on.stream), cuda::kSuccess);
  CHECK_EQ(Cuda().StreamQuery(waits.on.stream), cuda::kNotReady);
  CHECK_FAILS(late.Enqueue(*two.second), "the GPUs of this process were stopped");
  CHECK_EQ(waits.on.Synchronize(), kStopped);
}

// The end begins before the stop, and waits for the device.
TEST_ALONE(what_ends_when_the_devices_stop_asks_nccl_for_nothing_more, EXIT_SUCCESS) {
  Communicators two(OnFailure::kRaise);
  auto world = MakeWorld();
  Psum waits(0);
  CHECK_OK(waits.Enqueue(*two.first));
  world = nullptr;
  CHECK_TRUE(DevicesAreStopped());
  CHECK_EQ(waits.on.Synchronize(), kStopped);
  // That of the first rank, on whose device it waited, if it had begun.
  CHECK_TRUE(Count("ncclCommDestroy") <= 1);
}

TEST_ALONE(devices_that_cannot_be_stopped_end_the_process, kEndedStatus) {
  Communicators two(OnFailure::kRaise);
  Psum waits(0);
  // Before the operation, which launches no kernel of ours: its time may pass soon.
  TheFake().fail("cuLaunchKernel", 0, 1);
  TheFake().fail("cuLaunchKernel", 1, 1);
  CHECK_OK(waits.Enqueue(*two.first));
  Forever();
}

// What is made anew works: tests/nccl/test_failures.py.
TEST_ALONE(results_of_what_failed_are_poisoned, EXIT_SUCCESS) {
  Communicators two(OnFailure::kPoison);
  Psum waits(0);
  TimeOut(*two.first, waits, cuda::kSuccess);
  CHECK_TRUE(std::isnan(waits.result[0]));
  // The other has resources of its own, and nothing was on its way.
  const Status refused = Psum(0).Enqueue(*two.second);
  CHECK_FAILS(refused, "not done after 1 s");
  CHECK_FAILS(refused, "All communicators of NCCL in this process fail together");
  // What is made anew is not split off it, and its end aborts.
  CHECK_TRUE(two.world.lock()->is_broken());
}

// A communicator that hangs behind the one that times out, or beside it: the abort of
// one waits for the device, on which the other would hang until its own timeout, two
// minutes later.
void FailTogether(bool share) {
  Communicators two(OnFailure::kPoison, share);
  Psum waits(0), behind(0), never(1);
  // Until it is open nothing runs, and no time counts.
  Gate gate;
  gate.Hold(waits.on.stream);
  CHECK_OK(waits.Enqueue(*two.first));
  // Given to its stream before anything failed: NCCL has those that share take turns.
  CHECK_OK(behind.Enqueue(*two.second));
  gate.Open();
  for (Psum* sum : {&waits, &behind}) {
    CHECK_EQ(sum->on.Synchronize(), cuda::kSuccess);
    CHECK_TRUE(std::isnan(sum->result[0]));
  }
  // And so does the flight record say.
  for (const Communicator* each : {two.first.get(), two.second.get()}) {
    CHECK_TRUE(Until([&] {
      const auto entries = each->recorder().Snapshot();
      return entries.size() == 1 && entries[0].state == FlightRecorder::State::kFailed;
    }));
  }
  // With the first cause.
  CHECK_FAILS(never.Enqueue(*two.second), "not done after 1 s");
}

TEST_ALONE(those_that_share_resources_fail_together, EXIT_SUCCESS) {
  FailTogether(/*share=*/true);
}
TEST_ALONE(those_with_resources_of_their_own_fail_together, EXIT_SUCCESS) {
  FailTogether(/*share=*/false);
}

// The communicator of NCCL's that the last sum was given.
int64_t LastSummed() {
  const std::string trace = TheFake().trace();
  const std::string name = "\"ncclAllReduce\", \"comm\": ";
  return std::stoll(trace.substr(trace.rfind(name) + name.size()));
}

// NCCL tells no other rank of it: that one waits for rank 1 until its timeout.
TEST_ALONE(an_error_of_a_rank_that_does_nothing_ends_the_wait_for_it, EXIT_SUCCESS) {
  Communicators two(OnFailure::kPoison);
  Psum waits(0), late(1);
  const int64_t of_late = LastSummed();  // the creation ended with it
  CHECK_OK(waits.Enqueue(*two.second));
  CHECK_EQ(TheFake().async_error(of_late, nccl::kInternalError), 1);
  CHECK_EQ(waits.on.Synchronize(), cuda::kSuccess);
  CHECK_TRUE(std::isnan(waits.result[0]));
  const Status refused = late.Enqueue(*two.second);
  CHECK_FAILS(refused, "rank 0 of 2 (device 100): rank 1 of 2 (device 101): NCCL: ");
  CHECK_FAILS(refused, "(An asynchronous error that a test asked for)");
}

// Nor does it matter to those who do not wait for that rank, or who are done.
TEST_ALONE(an_error_of_a_rank_that_nobody_waits_for_ends_nothing, EXIT_SUCCESS) {
  Options options;
  options.size = 4;
  options.groups = {{100, 101}, {102, 103}};
  const auto communicator = Make(options);
  CHECK_EQ(TheFake().async_error(LastSummed(), nccl::kInternalError), 1);
  Psum waits(0), late(1);
  CHECK_OK(waits.Enqueue(*communicator));
  LetOthersRun();
  CHECK_OK(late.Enqueue(*communicator));
  for (Psum* sum : {&waits, &late}) {
    CHECK_EQ(sum->on.Synchronize(), cuda::kSuccess);
    CHECK_EQ(sum->result[0], 2.0f);
  }
  CHECK_FAILS(Psum(3).Enqueue(*communicator), "internal error");
}

// Another communicator cannot be made of their mesh.
void FailToSplit(const Communicators& two) {
  TheFake().fail("ncclCommSplit", 0, 3);
  const auto made = two.world.lock()->Split({0, 0}, {0, 1}, {}, {kHangSeconds});
  CHECK_FAILS(made.status(), "ncclCommSplit");
}

TEST_ALONE(what_is_in_flight_when_a_split_fails_has_its_timeout, EXIT_SUCCESS) {
  Communicators two(OnFailure::kPoison);
  Psum waits(0), late(1), first(0), second(1);
  Gate of_first, of_second;
  of_first.Hold(waits.on.stream);
  CHECK_OK(waits.Enqueue(*two.first));
  of_second.Hold(first.on.stream);
  for (Psum* sum : {&first, &second}) CHECK_OK(sum->Enqueue(*two.second));
  FailToSplit(two);
  // So it never comes, and nothing has failed by that.
  CHECK_FAILS(late.Enqueue(*two.first), "one more could not be made: ncclCommSplit");
  CHECK_EQ(ProcessFailure::Get().first(), "");
  of_second.Open();
  for (Psum* sum : {&first, &second}) {
    CHECK_EQ(sum->on.Synchronize(), cuda::kSuccess);
    CHECK_EQ(sum->result[0], 2.0f);
  }
  of_first.Open();
  CHECK_EQ(waits.on.Synchronize(), cuda::kSuccess);  // returns, or the test hangs
  CHECK_TRUE(std::isnan(waits.result[0]));
  CHECK_FAILS(late.Enqueue(*two.first), "not done after 1 s");
}

TEST_ALONE(closing_after_a_split_that_failed_hands_out_nothing, EXIT_SUCCESS) {
  Communicators two(OnFailure::kRaise);
  Psum waits(0);
  Gate gate;
  gate.Hold(waits.on.stream);
  CHECK_OK(waits.Enqueue(*two.first));
  FailToSplit(two);
  two.first->Abort(Status(ErrorCode::kCancelled, "closed"));
  CHECK_TRUE(DevicesAreStopped());
  two.first = nullptr;
  gate.Open();
  CHECK_EQ(waits.on.Synchronize(), kStopped);
}

// While a thread gives a stream an operation, and from then on. With one core another
// thread goes on at any point of a look: were the counts read in the wrong order, about
// every third trial would show it.
TEST_ALONE(an_operation_that_becomes_one_in_flight_is_never_overlooked, EXIT_SUCCESS) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  CHECK_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const CommunicatorSpec spec = Spec({{100, 101}});
  const std::vector<NcclDevice> devices{{100, 0, 0}, {101, 1, 1}};
  const PrimaryContexts contexts(Library(), devices);
  FlightRecorder recorder(spec.groups);
  NcclParts parts(
      spec, Library(),
      {std::make_shared<WorldHealth>(/*spans_processes=*/false), OnFailure::kRaise},
      devices, contexts, recorder, {kHangSeconds});
  Psum sum(0);
  LaunchQueue& queue = parts.ranks[0]->queue;
  CHECK_OK(queue.Prepare());
  for (int trial = 0; trial < 30; ++trial) {
    Gate gate;
    gate.Hold(sum.on.stream);
    Event looks, is_given;
    bool is_overlooked = false;
    std::thread other;
    const Call call = sum.CallOf();
    CHECK_OK(queue.Give(call, sum.on.stream, queue.Record(call), [&] {
      other = std::thread([&] {
        for (; !is_given.is_set(); looks.Set()) is_overlooked |= !HaveWork(parts.ranks);
      });
      CHECK_TRUE(looks.Wait());
      return OkStatus();
    }));
    is_given.Set();
    other.join();
    CHECK_TRUE(!is_overlooked);
    gate.Open();
    sum.on.Synchronize();
    queue.Refresh();
    CHECK_TRUE(!HaveWork(parts.ranks));
  }
  queue.Release();
}

TEST_ALONE(devices_are_stopped_where_nobody_reads_why, EXIT_SUCCESS) {
  Communicators two(OnFailure::kRaise);
  Psum waits(0);
  cuda::Result ended = cuda::kSuccess;
  {
    const BlockedStderr blocked;
    CHECK_OK(waits.Enqueue(*two.first));
    ended = waits.on.Synchronize();
  }
  CHECK_EQ(ended, kStopped);
}

TEST_ALONE(a_process_ends_where_nobody_reads_why, kEndedStatus) {
  const BlockedStderr blocked;
  const LastResort end(kExpires, "nobody reads this");
  Forever();
}

// Nor does one hold up the end of another for longer than that takes at most.
TEST_ALONE(one_that_hangs_holds_up_the_end_of_no_other, EXIT_SUCCESS) {
  Communicators two(OnFailure::kPoison);
  auto world = MakeWorld();
  Psum hangs(0);
  CHECK_OK(hangs.Enqueue(*two.second));
  world = nullptr;
  CHECK_EQ(Cuda().StreamQuery(hangs.on.stream), cuda::kNotReady);
  _exit(Failures() == 0 ? EXIT_SUCCESS : EXIT_FAILURE);  // its end takes long as well
}

TEST_ALONE(a_watch_that_the_driver_keeps_waiting_ends_the_process, kEndedStatus) {
  static std::atomic<bool> hangs{false};
  NcclLibrary library = Library();
  library.cuda.EventQuery = [](cuda::Event event) {
    if (hangs) Forever();
    return Cuda().EventQuery(event);
  };
  Communicators two(OnFailure::kRaise, /*share=*/false, kExpires, library);
  Psum waits(0);
  hangs = true;  // only the watch asks for events
  CHECK_OK(waits.Enqueue(*two.first));
  Forever();
}

}  // namespace
}  // namespace jaxcomm::testing
