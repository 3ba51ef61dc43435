// Tests how a process ends whose collectives fail while a device runs them.
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/backends/nccl/device_stop.h"
#include "ffi/backends/nccl/nccl_communicator.h"
#include "ffi/core/last_resort.h"
#include "tests/ffi/check.h"
#include "tests/ffi/fake_library.h"
#include "tests/ffi/fake_nccl.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

constexpr auto kMisaligned = static_cast<cuda::Result>(716);

std::shared_ptr<NcclWorld> MakeWorld(const NcclLibrary& library,
                                     const NcclSettings& settings) {
  const nccl::UniqueId id = NewId();
  return Must(NcclWorld::Create(library, 2, {{100, 0, 0}, {101, 1, 1}},
                                {id.internal, sizeof(id.internal)}, settings, {30},
                                {}));
}

// Two communicators of two devices each: they share resources, or have their own.
struct Two {
  explicit Two(OnFailure on_failure, bool share, const NcclLibrary& library = Library(),
               double seconds_of_second = 0.2) {
    const NcclSettings settings{{{"splitShare", share ? 1 : 0}}, ""};
    const auto world = MakeWorld(library, settings);
    for (std::shared_ptr<Communicator>* each : {&first, &second}) {
      const double seconds = each == &first ? 0.2 : seconds_of_second;
      *each = Must(MakeNcclCommunicator(Spec({{100, 101}}, seconds),
                                        {world, settings, {30}, {}, on_failure}));
    }
  }
  std::shared_ptr<Communicator> first, second;
};

// One psum of a number, as one device.
struct Sum {
  explicit Sum(int device)
      : on(device),
        device(device),
        site(MakeSite("all_reduce", {}, {FloatLeaf(1)}, {FloatLeaf(1)})) {}

  Status Enqueue(Communicator& communicator, int run = 1) {
    const void* operands[] = {&operand};
    void* results[] = {&result};
    return communicator.Enqueue(
        Call{site.get(), run, 1, 1, device, operands, results, nullptr}, on.stream);
  }

  OnDevice on;
  const int device;
  std::unique_ptr<CallSite> site;
  float operand = 1, result = -1;
};

std::string TextOf(const Status& status) { return std::string(status.message()); }

// The first rank waits in vain; the wait for its stream ends with `expected`.
void MissTheDeadline(Communicator& communicator, Sum& sum, cuda::Result expected) {
  CHECK_TRUE(sum.Enqueue(communicator).success());
  CHECK_EQ(sum.on.Synchronize(), expected);
}

TEST_ALONE(no_number_leaves_devices_that_are_stopped, EXIT_SUCCESS) {
  Two two(OnFailure::kRaise, /*share=*/false);
  Sum waits(0), late(1), beside(0);
  MissTheDeadline(*two.first, waits, kMisaligned);
  CHECK_EQ(waits.result, -1.0f);
  CHECK_TRUE(Comes([] { return DevicesAreStopped(); }));
  CHECK_CONTAINS(TextOf(late.Enqueue(*two.first)), "not done after 0.2 s");
  // Whatever else is live has lost its devices as well, and says why.
  const std::string text = TextOf(beside.Enqueue(*two.second));
  CHECK_CONTAINS(text, "the GPUs of this process are stopped");
  CHECK_CONTAINS(text, "not done after 0.2 s");
  CHECK_CONTAINS(FirstFailure(), "rank 0 of 2 (device 100): not done after 0.2 s");
  // Nothing asks NCCL for what needs the driver.
  two.first = two.second = nullptr;
  CHECK_EQ(Count("ncclCommAbort"), 0);
}

TEST_ALONE(nccl_says_that_the_devices_are_stopped, EXIT_SUCCESS) {
  Two two(OnFailure::kRaise, /*share=*/false);
  Sum waits(0);
  MissTheDeadline(*two.first, waits, kMisaligned);
  CHECK_EQ(TheFake().nccl.GroupStart(), nccl::kUnhandledCudaError);
  CHECK_CONTAINS(std::string(TheFake().nccl.GetLastError(nullptr)), "Cuda failure 716");
}

// The end begins before the stop, and waits for the device.
TEST_ALONE(what_ends_when_the_devices_stop_asks_nccl_for_nothing_more, EXIT_SUCCESS) {
  Two two(OnFailure::kRaise, /*share=*/false);
  auto world = MakeWorld(Library(), {});
  Sum waits(0);
  CHECK_TRUE(waits.Enqueue(*two.first).success());
  world = nullptr;
  CHECK_TRUE(DevicesAreStopped());
  CHECK_EQ(waits.on.Synchronize(), kMisaligned);
  // That of the first rank, on whose device it waited, if it had begun.
  CHECK_TRUE(Count("ncclCommDestroy") <= 1);
}

TEST_ALONE(a_process_may_rather_end, kEndedStatus) {
  Two two(OnFailure::kExit, /*share=*/false);
  Sum waits(0);
  MissTheDeadline(*two.first, waits, kMisaligned);
  std::this_thread::sleep_for(std::chrono::seconds(30));
}

TEST_ALONE(devices_that_cannot_be_stopped_end_the_process, kEndedStatus) {
  Two two(OnFailure::kRaise, /*share=*/false);
  Sum waits(0);
  // Before the operation, which launches no kernel of ours: its deadline may pass soon.
  TheFake().fail("cuLaunchKernel", 0, 1);
  TheFake().fail("cuLaunchKernel", 1, 1);
  CHECK_TRUE(waits.Enqueue(*two.first).success());
  std::this_thread::sleep_for(std::chrono::seconds(30));
}

TEST(results_of_what_failed_are_poisoned) {
  Two two(OnFailure::kPoison, /*share=*/false, Library(), /*seconds_of_second=*/30);
  Sum waits(0), late(1);
  MissTheDeadline(*two.first, waits, cuda::kSuccess);
  CHECK_TRUE(std::isnan(waits.result));
  CHECK_CONTAINS(TextOf(late.Enqueue(*two.first)), "not done after 0.2 s");
  CHECK_CONTAINS(FirstFailure(), "not done after 0.2 s");
  ForgetFailures();
  CHECK_EQ(FirstFailure(), "");
  // The other has resources of its own.
  Sum one(0), other(1);
  CHECK_TRUE(one.Enqueue(*two.second).success());
  CHECK_TRUE(other.Enqueue(*two.second).success());
  CHECK_EQ(one.on.Synchronize(), cuda::kSuccess);
  CHECK_EQ(one.result, 2.0f);
}

TEST(those_that_share_resources_fail_together_with_the_first_cause) {
  Two two(OnFailure::kPoison, /*share=*/true, Library(), /*seconds_of_second=*/30);
  Sum waits(0), behind(0), never(1);
  // Until it is open nothing runs, and no time counts.
  Gate gate;
  TheFake().cuda.LaunchHostFunc(waits.on.stream, &Gate::Wait, &gate);
  CHECK_TRUE(waits.Enqueue(*two.first).success());
  // Given to its stream before anything failed: NCCL has it wait for its turn.
  CHECK_TRUE(behind.Enqueue(*two.second).success());
  gate.open = true;
  CHECK_EQ(waits.on.Synchronize(), cuda::kSuccess);
  CHECK_EQ(behind.on.Synchronize(), cuda::kSuccess);
  CHECK_TRUE(std::isnan(waits.result));
  CHECK_TRUE(std::isnan(behind.result));
  const std::string text = TextOf(never.Enqueue(*two.second));
  CHECK_CONTAINS(text, "not done after 0.2 s");
  CHECK_CONTAINS(text, "Communicators that share resources fail together");
}

// The abort of one waits for the device, on which the other hangs until its deadline.
TEST(one_that_is_aborted_holds_up_no_other) {
  Two two(OnFailure::kPoison, /*share=*/false);
  Sum first(0), second(0);
  Gate gate;  // the time of both begins with it
  for (const Sum* sum : {&first, &second}) {
    TheFake().cuda.LaunchHostFunc(sum->on.stream, &Gate::Wait, &gate);
  }
  CHECK_TRUE(first.Enqueue(*two.first).success());
  CHECK_TRUE(second.Enqueue(*two.second).success());
  gate.open = true;
  CHECK_EQ(first.on.Synchronize(), cuda::kSuccess);
  CHECK_EQ(second.on.Synchronize(), cuda::kSuccess);
  CHECK_TRUE(std::isnan(first.result) && std::isnan(second.result));
}

// Nor does one hold up the end of another for longer than that takes at most.
TEST(one_that_hangs_holds_up_the_end_of_no_other) {
  Two two(OnFailure::kPoison, /*share=*/false, Library(), /*seconds_of_second=*/60);
  auto world = MakeWorld(Library(), {});
  Sum hangs(0);
  CHECK_TRUE(hangs.Enqueue(*two.second).success());
  const auto begin = std::chrono::steady_clock::now();
  world = nullptr;
  CHECK_TRUE(std::chrono::steady_clock::now() - begin < std::chrono::seconds(40));
  two.second->Abort(FailedPrecondition("closed"));
  CHECK_EQ(hangs.on.Synchronize(), cuda::kSuccess);
}

TEST_ALONE(a_watch_that_the_driver_keeps_waiting_ends_the_process, kEndedStatus) {
  static NcclLibrary library = Library();
  static std::atomic<bool> hangs{false};
  library.cuda.EventQuery = [](cuda::Event event) {
    while (hangs) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return TheFake().cuda.EventQuery(event);
  };
  Two two(OnFailure::kRaise, /*share=*/false, library);
  Sum waits(0);
  hangs = true;  // only the watch asks for events
  CHECK_TRUE(waits.Enqueue(*two.first).success());
  std::this_thread::sleep_for(std::chrono::seconds(60));
}

// One that compares calls, of three devices.
std::shared_ptr<Communicator> MakeChecked(double timeout_seconds = 30) {
  const nccl::UniqueId id = NewId();
  auto world =
      Must(NcclWorld::Create(Library(), 3, {{100, 0, 0}, {101, 1, 1}, {102, 2, 2}},
                             {id.internal, sizeof(id.internal)}, {}, {30}, {}));
  NcclSpec how{world, {}, {30}, {}, OnFailure::kPoison};
  how.check = true;
  return Must(MakeNcclCommunicator(Spec({{100, 101, 102}}, timeout_seconds), how));
}

TEST(ranks_that_agree_are_let_through) {
  auto communicator = MakeChecked();
  std::vector<std::thread> threads;
  for (int device = 0; device < 3; ++device) {
    threads.emplace_back([&, device] {
      Sum sum(device);
      for (int run = 1; run <= 3; ++run) {
        CHECK_TRUE(sum.Enqueue(*communicator, run).success());
      }
      sum.on.Synchronize();
      CHECK_EQ(sum.result, 3.0f);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ranks_that_disagree_all_hear_who_is_odd) {
  auto communicator = MakeChecked();
  std::vector<std::thread> threads;
  for (int device = 0; device < 3; ++device) {
    threads.emplace_back([&, device] {
      Sum sum(device);
      if (device == 1) {
        sum.site = MakeSite("all_gather", {1, 1}, {FloatLeaf(1)}, {FloatLeaf(3)});
      }
      const std::string text = TextOf(sum.Enqueue(*communicator));
      CHECK_CONTAINS(text, "JAXCOMM_CHECK: ranks disagree: rank 1 calls all_gather(");
      CHECK_CONTAINS(text, "where rank 0 calls all_reduce(float32[1])");
      CHECK_EQ(sum.result, -1.0f);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(a_rank_that_does_not_call_is_waited_for_until_the_deadline) {
  auto communicator = MakeChecked(0.3);
  Sum sum(0);
  CHECK_CONTAINS(TextOf(sum.Enqueue(*communicator)), "not done after 0.3 s");
}

}  // namespace
}  // namespace jaxcomm::testing
