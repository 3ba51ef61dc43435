// Tests how a process ends whose collectives fail while a device runs them.
#include <unistd.h>

#include <cmath>

#include "ffi/backends/nccl/device_stop.h"
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
    const auto world = MakeWorld(2, library, options.settings);
    options.timeout = kExpires;
    first = Make(options, world);
    options.timeout = seconds_of_second;
    second = Make(options, world);
  }
  std::shared_ptr<Communicator> first, second;
};

// One psum of a number, as one device.
struct Psum : Part {
  explicit Psum(int device) : Part(device, TheSite()) { operand[0] = 1; }
  static CallSite* TheSite() {
    static CallSite* const site = FloatSite("all_reduce", {}, 1).release();
    return site;
  }
};

// The rank waits in vain; the wait for its stream ends with `expected`.
void TimeOut(Communicator& communicator, Psum& sum, cuda::Result expected) {
  CHECK_OK(sum.Enqueue(communicator));
  CHECK_EQ(sum.on.Synchronize(), expected);
}

TEST_ALONE(no_number_leaves_devices_that_are_stopped, EXIT_SUCCESS) {
  Communicators two(OnFailure::kRaise);
  Psum waits(0), late(1), beside(0);
  TimeOut(*two.first, waits, kStopped);
  CHECK_EQ(waits.result[0], -1.0f);
  CHECK_TRUE(Until([] { return DevicesAreStopped(); }));
  CHECK_FAILS(late.Enqueue(*two.first), "not done after 1 s");
  // Whatever else is live has lost its devices as well, and says why.
  const Status refused = beside.Enqueue(*two.second);
  CHECK_FAILS(refused, "the GPUs of this process are stopped");
  CHECK_FAILS(refused, "not done after 1 s");
  CHECK_CONTAINS(FirstFailure(), "rank 0 of 2 (device 100): not done after 1 s");
  // Nothing asks NCCL for what needs the driver, which would refuse it.
  two.first = two.second = nullptr;
  CHECK_EQ(Count("ncclCommAbort"), 0);
  CHECK_EQ(Nccl().GroupStart(), nccl::kUnhandledCudaError);
  CHECK_CONTAINS(std::string(Nccl().GetLastError(nullptr)), "Cuda failure 716");
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

TEST_ALONE(a_process_may_rather_end, kEndedStatus) {
  Communicators two(OnFailure::kExit);
  Psum waits(0);
  CHECK_OK(waits.Enqueue(*two.first));
  Forever();
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

TEST_ALONE(results_of_what_failed_are_poisoned, EXIT_SUCCESS) {
  Communicators two(OnFailure::kPoison);
  Psum waits(0), late(1);
  TimeOut(*two.first, waits, cuda::kSuccess);
  CHECK_TRUE(std::isnan(waits.result[0]));
  CHECK_FAILS(late.Enqueue(*two.first), "not done after 1 s");
  CHECK_CONTAINS(FirstFailure(), "not done after 1 s");
  ForgetFailures();
  CHECK_EQ(FirstFailure(), "");
  // The other has resources of its own.
  Psum one(0), other(1);
  CHECK_OK(one.Enqueue(*two.second));
  CHECK_OK(other.Enqueue(*two.second));
  CHECK_EQ(one.on.Synchronize(), cuda::kSuccess);
  CHECK_EQ(one.result[0], 2.0f);
}

TEST_ALONE(those_that_share_resources_fail_together_with_the_first_cause,
           EXIT_SUCCESS) {
  Communicators two(OnFailure::kPoison, /*share=*/true);
  Psum waits(0), behind(0), never(1);
  // Until it is open nothing runs, and no time counts.
  Gate gate;
  gate.Hold(waits.on.stream);
  CHECK_OK(waits.Enqueue(*two.first));
  // Given to its stream before anything failed: NCCL has it wait for its turn.
  CHECK_OK(behind.Enqueue(*two.second));
  gate.Open();
  for (Psum* sum : {&waits, &behind}) {
    CHECK_EQ(sum->on.Synchronize(), cuda::kSuccess);
    CHECK_TRUE(std::isnan(sum->result[0]));
  }
  const Status refused = never.Enqueue(*two.second);
  CHECK_FAILS(refused, "not done after 1 s");
  CHECK_FAILS(refused, "Communicators that share resources fail together");
}

// The abort of one waits for the device, on which the other hangs until its timeout.
TEST_ALONE(one_that_is_aborted_holds_up_no_other, EXIT_SUCCESS) {
  Communicators two(OnFailure::kPoison, /*share=*/false, kExpires);
  Psum first(0), second(0);
  Gate gate;  // the time of both begins with it
  for (const Psum* sum : {&first, &second}) gate.Hold(sum->on.stream);
  CHECK_OK(first.Enqueue(*two.first));
  CHECK_OK(second.Enqueue(*two.second));
  gate.Open();
  for (Psum* sum : {&first, &second}) {
    CHECK_EQ(sum->on.Synchronize(), cuda::kSuccess);
    CHECK_TRUE(std::isnan(sum->result[0]));
  }
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

// One that compares calls, of three devices.
std::shared_ptr<Communicator> MakeChecked(double timeout_seconds = kHangSeconds) {
  Options options;
  options.size = 3;
  options.timeout = timeout_seconds;
  options.check = true;
  return Make(options);
}

TEST(ranks_that_agree_are_let_through) {
  auto communicator = MakeChecked();
  ForRanks(3, [&](int device) {
    Psum sum(device);
    for (int run = 1; run <= 3; ++run) CHECK_OK(sum.Enqueue(*communicator, run));
    sum.on.Synchronize();
    CHECK_EQ(sum.result[0], 3.0f);
  });
}

TEST(ranks_that_disagree_all_hear_who_is_odd) {
  auto communicator = MakeChecked();
  const auto gather = FloatSite("all_gather", {1}, 1, 3);
  ForRanks(3, [&](int device) {
    Part part(device, device == 1 ? gather.get() : Psum::TheSite());
    const Status refused = part.Enqueue(*communicator);
    CHECK_FAILS(refused, "JAXCOMM_CHECK: ranks disagree: rank 1 calls all_gather(");
    CHECK_FAILS(refused, "where rank 0 calls all_reduce(float32[1])");
    CHECK_EQ(part.result[0], -1.0f);
  });
}

TEST_ALONE(a_rank_that_does_not_call_is_waited_for_until_the_timeout, EXIT_SUCCESS) {
  CHECK_FAILS(Psum(0).Enqueue(*MakeChecked(kExpires)), "not done after 1 s");
}

}  // namespace
}  // namespace jaxcomm::testing
