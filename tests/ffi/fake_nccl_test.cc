// How unkind the stand-in for libnccl and libcuda is: what it refuses, holds back and
// does not tell, as the real ones were seen to do. One that forgave would hide mistakes
// of the product. Tests of the product see what it computes.
#include <signal.h>
#include <unistd.h>

#include "tests/ffi/check.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {
namespace {

using nccl::kSuccess;
using nccl::RedOp;
using nccl::Type;

// Checks what every rank sees after `call` did not fit, and that only an abort helps.
void CheckDisagreement(const std::function<nccl::Result(Rank, int32_t*)>& call,
                       const std::string& text) {
  RunRanks(3, [&](Rank& r) {
    int32_t values[16] = {};
    call(r, values);
    CHECK_TRUE(Until([&] { return AsyncErrorOf(r.comm) != kSuccess; }));
    CHECK_EQ(AsyncErrorOf(r.comm), nccl::kInvalidUsage);
    CHECK_EQ(std::string(Nccl().GetLastError(r.comm)), text);
    CHECK_EQ(Nccl().CommDestroy(r.comm), nccl::kInvalidUsage);
    CHECK_EQ(r.Abort(), kSuccess);
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);
  });
}

TEST(ranks_that_disagree_have_an_asynchronous_error) {
  CheckDisagreement(
      [](Rank r, int32_t* values) {
        return Nccl().AllReduce(values, values, r.rank == 2 ? 2 : 1, Type::kInt32,
                                r.rank == 2 ? RedOp::kMax : RedOp::kSum, r.comm,
                                r.stream());
      },
      "Rank 0 and rank 2 disagree about ncclAllReduce: count 1 against 2, op 0 against "
      "2");
  CheckDisagreement(
      [](Rank r, int32_t* values) {
        return r.rank == 0
                   ? Nccl().Send(values, 2, Type::kInt32, 1, r.comm, r.stream())
                   : Nccl().Recv(values, 1, Type::kInt32, 0, r.comm, r.stream());
      },
      "Rank 0 sends count 2 type 2 and rank 1 receives count 1 type 2");
}

// Until both ranks have looked: the abort of one ends what the other is at.
void WaitForBoth(std::atomic<int>& looked) {
  ++looked;
  CHECK_TRUE(Until([&] { return looked >= 2; }));
}

TEST(sends_outside_a_group_wait_and_an_abort_ends_them) {
  std::atomic<int> looked{0};
  RunRanks(2, [&](Rank& r) {
    int32_t sent = 7, received = 0;
    Nccl().Send(&sent, 1, Type::kInt32, 1 - r.rank, r.comm, r.stream());
    Nccl().Recv(&received, 1, Type::kInt32, 1 - r.rank, r.comm, r.stream());
    CHECK_EQ(Cuda().StreamQuery(r.stream()), cuda::kNotReady);
    WaitForBoth(looked);
    CHECK_EQ(r.Abort(), kSuccess);
    // The stream goes on.
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);
    CHECK_EQ(received, 0);
  });
}

nccl::Comm Split(nccl::Comm comm, int key, nccl::Config* config) {
  nccl::Comm child = nullptr;
  CHECK_EQ(Nccl().CommSplit(comm, 0, key, &child, config), kSuccess);
  return child;
}

TEST(those_that_share_resources_take_turns_and_go_together) {
  std::atomic<int> looked{0};
  RunRanks(2, [&](Rank& r) {
    nccl::Config config = NewConfig();
    config.split_share = 1;
    const nccl::Comm shared = Split(r.comm, r.rank, &config);
    config.split_share = 0;
    const nccl::Comm own = Split(r.comm, r.rank, &config);
    int32_t never = 0, behind = 1, beside = 1;
    OnDevice second(r.rank), third(r.rank);
    Nccl().Recv(&never, 1, Type::kInt32, 1 - r.rank, r.comm, r.stream());
    Sum(shared, second.stream, &behind);
    // What has its own need not wait.
    Sum(own, third.stream, &beside);
    third.Synchronize();
    CHECK_EQ(beside, 2);
    CHECK_EQ(Cuda().StreamQuery(second.stream), cuda::kNotReady);
    WaitForBoth(looked);

    CHECK_EQ(Nccl().CommAbort(shared), kSuccess);
    second.Synchronize();
    r.on->Synchronize();
    CHECK_EQ(behind, 1);
    // NCCL tells its siblings nothing: their operations end, and leave the results as
    // they were.
    CHECK_EQ(AsyncErrorOf(r.comm), kSuccess);
    int32_t alone = 1;
    CHECK_EQ(Sum(r.comm, r.stream(), &alone), kSuccess);
    r.on->Synchronize();
    CHECK_EQ(alone, 1);
    CHECK_EQ(AsyncErrorOf(own), kSuccess);
    CHECK_EQ(Nccl().CommDestroy(own), kSuccess);
  });
}

TEST(what_needs_a_context_fails_without_one) {
  cuda::Stream stream = nullptr;
  cuda::Pointer pointer = 0;
  CHECK_EQ(int{Cuda().StreamCreateWithPriority(&stream, 0, 0)}, 201);
  CHECK_EQ(int{Cuda().MemAlloc(&pointer, 8)}, 201);
  OnDevice on(0);
  CHECK_EQ(Cuda().MemAlloc(&pointer, size_t{17} << 30), cuda::kOutOfMemory);
  CHECK_EQ(Cuda().MemAlloc(&pointer, 8), cuda::kSuccess);
  CHECK_EQ(Cuda().MemFree(pointer), cuda::kSuccess);
  CHECK_EQ(Cuda().MemFree(pointer), cuda::kInvalidValue);
  CHECK_CONTAINS(TheFake().misuse(), "memory that is none, or none any more");
}

int Violations() {
  const std::string trace = TheFake().trace();
  int count = 0;
  for (size_t at = 0; (at = trace.find("violation", at)) != std::string::npos; ++at) {
    ++count;
  }
  return count;
}

TEST(what_must_not_be_called_during_capture_fails_and_is_noted) {
  constexpr auto kUnsupported = static_cast<cuda::Result>(900);
  RunRanks(1, [&](Rank& r) {
    cuda::Pointer pointer = 0;
    void* handle = nullptr;
    int32_t value = 1;
    nccl::Config config = NewConfig();
    nccl::Comm child = nullptr;
    cuda::Event event = nullptr;
    Cuda().EventCreate(&event, 0);
    TheFake().clear_trace();
    TheFake().set_capturing(r.stream(), true);
    cuda::CaptureStatus status = cuda::kCaptureNone;
    CHECK_EQ(Cuda().StreamIsCapturing(r.stream(), &status), cuda::kSuccess);
    CHECK_EQ(int{status}, int{cuda::kCaptureActive});
    CHECK_EQ(Cuda().MemAlloc(&pointer, 8), kUnsupported);
    CHECK_EQ(r.on->Synchronize(), kUnsupported);
    CHECK_EQ(Nccl().CommRegister(r.comm, &value, 4, &handle),
             nccl::kUnhandledCudaError);
    CHECK_CONTAINS(Nccl().GetLastError(nullptr), "Cuda failure 900");
    CHECK_EQ(Nccl().CommSplit(r.comm, 0, 0, &child, &config),
             nccl::kUnhandledCudaError);
    CHECK_EQ(Violations(), 4);
    CHECK_EQ(Sum(r.comm, r.stream(), &value), kSuccess);
    Cuda().EventRecord(event, r.stream());
    CHECK_EQ(int{Cuda().EventQuery(event)}, 907);
    // Another thread that captures nothing may.
    std::thread([&] {
      OnDevice other(1);
      CHECK_EQ(Cuda().MemAlloc(&pointer, 8), cuda::kSuccess);
      CHECK_EQ(Cuda().MemFree(pointer), cuda::kSuccess);
    }).join();
    TheFake().set_capturing(r.stream(), false);
    TheFake().end_graphs();
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);

    CHECK_EQ(Cuda().MemAlloc(&pointer, 8), cuda::kSuccess);
    CHECK_EQ(Nccl().CommRegister(r.comm, reinterpret_cast<void*>(pointer), 8, &handle),
             kSuccess);
    TheFake().clear_trace();
    CHECK_EQ(Cuda().MemFree(pointer), cuda::kSuccess);
    CHECK_EQ(Violations(), 1);
  });
}

// NCCL's kernels within a host behave so: only an abort ends them, and they wrote
// nothing. Ranks are processes, each on its own device 0.
TEST_ALONE(nobody_is_told_of_a_dead_process_in_an_operation, EXIT_SUCCESS) {
  constexpr int kSize = 3;
  int made[2];
  CHECK_EQ(pipe(made), 0);
  const nccl::UniqueId id = NewId();
  const auto body = [&](Rank& r) {
    char byte = 0;
    if (r.rank == 1) {
      // Whoever still makes its communicator would be told.
      for (int other = 0; other < kSize - 1; ++other)
        CHECK_EQ(read(made[0], &byte, 1), 1);
      raise(SIGKILL);
    }
    CHECK_EQ(write(made[1], &byte, 1), 1);
    int32_t value = 1;
    CHECK_EQ(Sum(r.comm, r.stream(), &value), kSuccess);
    LetOthersRun();
    CHECK_EQ(AsyncErrorOf(r.comm), kSuccess);
    CHECK_EQ(r.Abort(), kSuccess);
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);
    CHECK_EQ(value, 1);
  };
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < kSize; ++rank) {
    children.push_back(
        std::make_unique<Child>([&, rank] { RunRank(id, rank, kSize, body, 0); }));
  }
  for (int rank = 0; rank < kSize; ++rank) {
    CHECK_EQ(children[rank]->Wait(), rank == 1 ? -SIGKILL : EXIT_SUCCESS);
  }
}

}  // namespace
}  // namespace jaxcomm::testing
