// Communicators that are not ours alone: operations on those that XLA made, and splits
// of the communicator of a mesh.

#include "ffi/backends/nccl/borrowed_communicator.h"
#include "ffi/core/last_resort.h"
#include "ffi/flight/flight_recorder.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

std::shared_ptr<BorrowedCommunicator> Borrow(double timeout_seconds = kHangSeconds,
                                             const NcclLibrary& library = Library(),
                                             OnFailure on_failure = OnFailure::kRaise) {
  auto made = std::make_shared<BorrowedCommunicator>(
      Spec({{100, 101}}, timeout_seconds), library,
      std::vector<NcclDevice>{{100, 0}, {101, 1}}, Borrowed{{{0, 1}}, 0}, on_failure);
  CHECK_OK(made->Prepare());
  return made;
}

// One psum of a number, as one rank.
struct Psum {
  explicit Psum(float value) : operand(value) {}

  Status Enqueue(BorrowedCommunicator& communicator, const struct Rank& as,
                 int run = 1) {
    const void* operands[] = {&operand};
    void* results[] = {&result};
    Call call{site.get(), run, 1, 1, as.rank, operands, results, nullptr};
    call.borrowed = as.comm;
    return communicator.Enqueue(call, as.stream());
  }

  std::unique_ptr<CallSite> site = FloatSite("all_reduce", {}, 1);
  float operand, result = -1;
};

TEST(an_operation_is_done_when_its_device_is) {
  auto communicator = Borrow();
  RunRanks(2, [&](struct Rank as) {
    Psum sum(static_cast<float>(as.rank + 1));
    Gate gate;
    if (as.rank == 0) gate.Hold(as.stream());
    CHECK_OK(sum.Enqueue(*communicator, as));
    if (as.rank == 0) {
      CHECK_TRUE(communicator->stats().in_flight > 0);
      CHECK_TRUE(communicator->Poll());
      gate.Open();
    }
    as.on->Synchronize();
    CHECK_EQ(sum.result, 3.0f);
  });
  CHECK_TRUE(!communicator->Poll());
  CHECK_EQ(communicator->stats().in_flight, 0);
  const auto entries = communicator->recorder().Snapshot();
  CHECK_EQ(entries.size(), 2u);
  for (const auto& entry : entries) {
    CHECK_TRUE(entry.state == FlightRecorder::State::kCompleted);
  }
}

// A communicator that does not block has yet to give the stream this.
thread_local std::function<nccl::Result()> pending;
thread_local int polls_until_given = 0;

TEST(one_that_does_not_block_has_given_the_stream_its_operation) {
  NcclLibrary library = Library();
  library.nccl.AllReduce = [](const void* from, void* to, size_t count, nccl::Type type,
                              nccl::RedOp op, nccl::Comm comm, nccl::Stream stream) {
    polls_until_given = 3;
    pending = [=] { return Nccl().AllReduce(from, to, count, type, op, comm, stream); };
    return nccl::kInProgress;
  };
  library.nccl.CommGetAsyncError = [](nccl::Comm, nccl::Result* state) {
    *state = --polls_until_given > 0 ? nccl::kInProgress : pending();
    return nccl::kSuccess;
  };
  auto communicator = Borrow(kHangSeconds, library);
  RunRanks(2, [&](struct Rank as) {
    Psum sum(static_cast<float>(as.rank + 1));
    CHECK_OK(sum.Enqueue(*communicator, as));
    as.on->Synchronize();
    CHECK_EQ(sum.result, 3.0f);
  });
}

// Rank 0 waits for rank 1, which does not come, until the timeout.
void TimeOut(BorrowedCommunicator& communicator) {
  RunRanks(2, [&](struct Rank as) {
    if (as.rank == 1) return;
    Psum sum(1);
    CHECK_OK(sum.Enqueue(communicator, as));
    CHECK_TRUE(Until([&] { return !communicator.Poll(); }));
    // The wait for its stream ends, with an error; and nothing was written.
    CHECK_EQ(as.on->Synchronize(), kStopped);
    CHECK_EQ(sum.result, -1.0f);
    const Status refused = sum.Enqueue(communicator, as, 2);
    CHECK_TRUE(*refused.errc() == ErrorCode::kDeadlineExceeded);
    CHECK_FAILS(refused, "all_reduce(float32[1]) over axes ('x',) (lane 'default', ");
    CHECK_FAILS(refused, "rank 0 of 2 (device 100): not done after 1 s");
    CHECK_FAILS(refused, "the GPUs of this process are stopped");
    _exit(Failures() == 0 ? EXIT_SUCCESS : EXIT_FAILURE);
  });
}

TEST_ALONE(what_is_not_done_at_the_timeout_stops_the_devices, EXIT_SUCCESS) {
  TimeOut(*Borrow(kExpires));
}

TEST_ALONE(or_ends_the_process, kEndedStatus) {
  TimeOut(*Borrow(kExpires, Library(), OnFailure::kExit));
}

TEST_ALONE(a_split_that_others_do_not_come_to_ends_with_the_world, EXIT_SUCCESS) {
  NcclLibrary library = Library();
  library.test_double = nullptr;
  const nccl::UniqueId id = NewId();
  std::shared_ptr<NcclWorld> worlds[2];
  ForRanks(2, [&](int rank) {
    worlds[rank] = Must(NcclWorld::Create(library, 2, {{rank, rank, rank}},
                                          {id.internal, sizeof(id.internal)}, {},
                                          {kHangSeconds}, {}));
  });
  // NCCL may still write to its targets: they do not lie on the caller's stack.
  CHECK_FAILS(worlds[0]->Split({0}, {0}, {}, {kExpires}).status(),
              "not done after 1 s");
  CHECK_TRUE(worlds[0]->is_broken());
  TheFake().clear_trace();
  worlds[0].reset();
  // The world, and what came of the split when that was aborted.
  CHECK_EQ(Count("ncclCommAbort"), 2);
}

}  // namespace
}  // namespace jaxcomm::testing
