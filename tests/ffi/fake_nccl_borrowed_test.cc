// Tests operations on communicators that XLA made, and how those end that hang.
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "ffi/backends/nccl/borrowed_communicator.h"
#include "ffi/core/last_resort.h"
#include "ffi/flight/flight_recorder.h"
#include "tests/ffi/check.h"
#include "tests/ffi/fake_library.h"
#include "tests/ffi/fake_nccl.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

std::shared_ptr<BorrowedCommunicator> Make(double timeout_seconds,
                                           const NcclLibrary& library = Library(),
                                           OnFailure on_failure = OnFailure::kRaise) {
  auto made = std::make_shared<BorrowedCommunicator>(
      Spec({{100, 101}}, timeout_seconds), library,
      std::vector<NcclDevice>{{100, 0}, {101, 1}}, Borrowed{{{0, 1}}, 0}, on_failure);
  CHECK_TRUE(made->Prepare().success());
  return made;
}

// One psum of a number, as one rank.
struct Sum {
  Sum(float value, int run)
      : site(MakeSite("all_reduce", {}, {FloatLeaf(1)}, {FloatLeaf(1)})),
        operand(value),
        run(run) {}

  Status Enqueue(BorrowedCommunicator& communicator, const struct Rank& as) {
    const void* operands[] = {&operand};
    void* results[] = {&result};
    Call call{site.get(), run, 1, 1, as.rank, operands, results, nullptr};
    call.borrowed = as.comm;
    return communicator.Enqueue(call, as.stream());
  }

  std::unique_ptr<CallSite> site;
  float operand, result = -1;
  int run;
};

int CountOf(const Communicator& communicator, FlightRecorder::State state) {
  int count = 0;
  for (const auto& entry : communicator.recorder().Snapshot()) {
    count += entry.state == state;
  }
  return count;
}

TEST(an_operation_is_done_when_its_device_is) {
  auto communicator = Make(30);
  RunRanks(2, [&](struct Rank as) {
    Sum sum(static_cast<float>(as.rank + 1), 1);
    Gate gate;
    if (as.rank == 0) {
      TheFake().cuda.LaunchHostFunc(as.stream(), &Gate::Wait, &gate);
    }
    CHECK_TRUE(sum.Enqueue(*communicator, as).success());
    if (as.rank == 0) {
      CHECK_TRUE(communicator->stats().in_flight > 0);
      CHECK_TRUE(communicator->Poll());
      gate.open = true;
    }
    as.on->Synchronize();
    CHECK_EQ(sum.result, 3.0f);
  });
  CHECK_TRUE(!communicator->Poll());
  CHECK_EQ(communicator->stats().in_flight, 0);
  CHECK_EQ(CountOf(*communicator, FlightRecorder::State::kCompleted), 2);
}

// A communicator that does not block has yet to give the stream this.
thread_local std::function<nccl::Result()> pending;
thread_local int polls_until_given = 0;

TEST(one_that_does_not_block_has_given_the_stream_its_operation) {
  NcclLibrary library = Library();
  library.nccl.AllReduce = [](const void* from, void* to, size_t count, nccl::Type type,
                              nccl::RedOp op, nccl::Comm comm, nccl::Stream stream) {
    polls_until_given = 3;
    pending = [=] {
      return TheFake().nccl.AllReduce(from, to, count, type, op, comm, stream);
    };
    return nccl::kInProgress;
  };
  library.nccl.CommGetAsyncError = [](nccl::Comm, nccl::Result* state) {
    *state = --polls_until_given > 0 ? nccl::kInProgress : pending();
    return nccl::kSuccess;
  };
  auto communicator = Make(30, library);
  RunRanks(2, [&](struct Rank as) {
    Sum sum(static_cast<float>(as.rank + 1), 1);
    CHECK_TRUE(sum.Enqueue(*communicator, as).success());
    as.on->Synchronize();
    CHECK_EQ(sum.result, 3.0f);
  });
}

// Rank 0 waits for rank 1, which does not come, until the deadline.
void MissTheDeadline(BorrowedCommunicator& communicator) {
  RunRanks(2, [&](struct Rank as) {
    if (as.rank == 1) return;
    Sum sum(1, 1);
    CHECK_TRUE(sum.Enqueue(communicator, as).success());
    const auto begin = std::chrono::steady_clock::now();
    while (communicator.Poll()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK_TRUE(std::chrono::steady_clock::now() - begin >=
               std::chrono::milliseconds(150));
    // The wait for its stream ends, with an error; and nothing was written.
    CHECK_EQ(as.on->Synchronize(), static_cast<cuda::Result>(716));
    CHECK_EQ(sum.result, -1.0f);
    Sum next(1, 2);
    const Status refused = next.Enqueue(communicator, as);
    CHECK_TRUE(*refused.errc() == ErrorCode::kDeadlineExceeded);
    const std::string text(refused.message());
    CHECK_CONTAINS(text, "all_reduce(float32[1]) over axes ('x',) (lane 'default', ");
    CHECK_CONTAINS(text, "rank 0 of 2 (device 100): not done after 0.2 s");
    CHECK_CONTAINS(text, "the GPUs of this process are stopped");
    _exit(Failures() == 0 ? EXIT_SUCCESS : EXIT_FAILURE);
  });
}

TEST_ALONE(what_is_not_done_at_the_deadline_stops_the_devices, EXIT_SUCCESS) {
  auto communicator = Make(0.2);
  MissTheDeadline(*communicator);
}

TEST_ALONE(or_ends_the_process, kEndedStatus) {
  auto communicator = Make(0.2, Library(), OnFailure::kExit);
  MissTheDeadline(*communicator);
}

}  // namespace
}  // namespace jaxcomm::testing
