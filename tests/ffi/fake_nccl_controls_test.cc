// The stand-in for libnccl and libcuda: streams and events, the trace, faults on
// demand, pretended capture, and ranks as processes.
#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#include "tests/ffi/check.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {
namespace {

using nccl::kSuccess;
using nccl::RedOp;
using nccl::Type;

std::vector<std::string> TraceLines(const std::string& containing) {
  std::vector<std::string> lines;
  std::string trace = TheFake().trace();
  for (size_t end = 0; (end = trace.find('\n')) != std::string::npos;) {
    const std::string line = trace.substr(0, end);
    if (line.find(containing) != std::string::npos) lines.push_back(line);
    trace.erase(0, end + 1);
  }
  return lines;
}

nccl::Result SumOf(Rank r, int32_t* value) { return Sum(r.comm, r.stream(), value); }

TEST(streams_run_in_order_and_wait_for_the_last_record_of_an_event) {
  OnDevice first(0), second(0);
  cuda::Event event = nullptr;
  Cuda().EventCreate(&event, cuda::kEventDisableTiming);
  CHECK_EQ(Cuda().EventQuery(event), cuda::kSuccess);
  CHECK_EQ(Cuda().StreamWaitEvent(second.stream, event, 0), cuda::kSuccess);
  CHECK_EQ(second.Synchronize(), cuda::kSuccess);

  Gate gate;
  char data[4] = {};
  const auto address = reinterpret_cast<cuda::Pointer>(&data[0]);
  Cuda().EventRecord(event, first.stream);
  first.Synchronize();
  gate.Hold(first.stream);
  Cuda().MemsetD8Async(address, 5, 2, first.stream);
  Cuda().EventRecord(event, first.stream);
  CHECK_EQ(Cuda().EventQuery(event), cuda::kNotReady);
  CHECK_EQ(Cuda().StreamQuery(first.stream), cuda::kNotReady);
  Cuda().StreamWaitEvent(second.stream, event, 0);
  Cuda().MemcpyDtoDAsync(address + 2, address, 2, second.stream);
  CHECK_EQ(Cuda().StreamQuery(second.stream), cuda::kNotReady);
  gate.Open();
  CHECK_EQ(second.Synchronize(), cuda::kSuccess);
  CHECK_EQ(int{data[3]}, 5);
  CHECK_EQ(Cuda().EventQuery(event), cuda::kSuccess);
  CHECK_EQ(Cuda().EventDestroy(event), cuda::kSuccess);
  CHECK_TRUE(Cuda().EventQuery(event) != cuda::kSuccess);
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
}

TEST(a_host_function_may_not_call_cuda) {
  OnDevice on(0);
  static cuda::Result result = cuda::kSuccess;
  Cuda().LaunchHostFunc(
      on.stream, [](void* stream) { result = Cuda().StreamQuery(stream); }, on.stream);
  on.Synchronize();
  CHECK_EQ(int{result}, 800);
}

TEST(the_trace_says_what_was_called_and_that_a_group_is_one_launch) {
  RunRanks(1, [](Rank r) {
    int32_t a = 1, b = 2;
    TheFake().clear_trace();
    Nccl().GroupStart();
    Nccl().Send(&a, 1, Type::kInt32, 0, r.comm, r.stream());
    Nccl().Recv(&b, 1, Type::kInt32, 0, r.comm, r.stream());
    Nccl().Broadcast(&a, &a, 1, Type::kFloat32, 0, r.comm, r.stream());
    Nccl().GroupEnd();
    r.on->Synchronize();
    for (int i = 0; i < 10; ++i) AsyncErrorOf(r.comm);
    const std::string comm =
        "\"comm\": " + std::to_string(reinterpret_cast<uintptr_t>(r.comm));
    const auto line = [](const std::string& containing) {
      const auto lines = TraceLines(containing);
      CHECK_EQ(lines.size(), 1u);
      return lines.empty() ? "" : lines[0];
    };
    CHECK_CONTAINS(line("ncclSend"), comm + ", \"stream\": ");
    CHECK_CONTAINS(line("ncclSend"),
                   "\"count\": 1, \"type\": 2, \"peer\": 0, \"group\": ");
    CHECK_CONTAINS(line("\"launch\""), comm + ", \"count\": 3");
    CHECK_CONTAINS(line("ncclCommGetAsyncError"), "\"times\": 10");
  });
}

TEST(faults_come_when_they_were_asked_for) {
  RunRanks(1, [](Rank r) {
    int32_t value = 3;
    TheFake().fail("ncclAllReduce", 1, nccl::kSystemError);
    CHECK_EQ(SumOf(r, &value), kSuccess);
    CHECK_EQ(SumOf(r, &value), nccl::kSystemError);
    CHECK_EQ(SumOf(r, &value), kSuccess);
    TheFake().fail("cuEventCreate", 0, 2);
    cuda::Event event = nullptr;
    CHECK_EQ(Cuda().EventCreate(&event, 0), cuda::kOutOfMemory);

    // A split blocks if its parent does.
    nccl::Config config = NewConfig();
    config.blocking = 0;
    nccl::Comm parent = nullptr, child = nullptr;
    CHECK_EQ(Nccl().CommInitRankConfig(&parent, 1, NewId(), 0, &config),
             nccl::kInProgress);
    CHECK_TRUE(Until([&] { return AsyncErrorOf(parent) != nccl::kInProgress; }));
    TheFake().hang("ncclCommSplit", 0);
    CHECK_EQ(Nccl().CommSplit(parent, 0, 0, &child, nullptr), nccl::kInProgress);
    CHECK_EQ(AsyncErrorOf(parent), nccl::kInProgress);
    // It is there when the split is over, which its parent's end ends.
    CHECK_TRUE(child == nullptr);
    CHECK_EQ(Nccl().CommAbort(parent), kSuccess);
    CHECK_TRUE(child != nullptr);
    CHECK_EQ(Nccl().CommAbort(child), kSuccess);

    r.on->Synchronize();
    TheFake().hang("ncclAllReduce", 0);
    CHECK_EQ(SumOf(r, &value), kSuccess);
    CHECK_EQ(Cuda().StreamQuery(r.stream()), cuda::kNotReady);
    CHECK_EQ(AsyncErrorOf(r.comm), kSuccess);
    const auto number = static_cast<int64_t>(reinterpret_cast<uintptr_t>(r.comm));
    CHECK_EQ(TheFake().async_error(number, nccl::kRemoteError), 1);
    CHECK_EQ(AsyncErrorOf(r.comm), nccl::kRemoteError);
    CHECK_EQ(SumOf(r, &value), nccl::kRemoteError);
    CHECK_EQ(Nccl().CommAbort(r.comm), kSuccess);
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);
    CHECK_EQ(TheFake().async_error(number, nccl::kRemoteError), 0);
  });
}

TEST(what_must_not_be_called_during_capture_fails_and_is_noted) {
  constexpr auto kUnsupported = static_cast<cuda::Result>(900);
  RunRanks(1, [&](Rank r) {
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
    CHECK_EQ(TraceLines("violation").size(), 4u);
    CHECK_EQ(SumOf(r, &value), kSuccess);
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
    CHECK_EQ(TraceLines("freed while registered").size(), 1u);
  });
}

constexpr int kSize = 3;

// Ranks as processes, each on its own device 0. A test of them is alone, and so in a
// process without threads, which may fork. Returns how they ended.
std::vector<int> RunProcesses(const std::function<void(Rank)>& body, int size = kSize) {
  const nccl::UniqueId id = NewId();
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < size; ++rank) {
    children.push_back(
        std::make_unique<Child>([&] { RunRank(id, rank, size, body, 0); }));
  }
  std::vector<int> statuses;
  for (const auto& child : children) statuses.push_back(child->Wait());
  return statuses;
}

const std::vector<int> kAllWell(kSize, EXIT_SUCCESS);

TEST_ALONE(faults_can_come_from_the_environment, EXIT_SUCCESS) {
  setenv("JAXCOMM_FAKE_FAULTS", "ncclGetVersion:1:2,ncclSend:0:die", 1);
  CHECK_EQ(Child([] {
             int version = 0;
             CHECK_EQ(Nccl().GetVersion(&version), kSuccess);
             CHECK_EQ(version, 23203);
             CHECK_EQ(Nccl().GetVersion(&version), nccl::kSystemError);
             CHECK_EQ(Nccl().GetVersion(&version), kSuccess);
             if (Failures() > 0) return;
             Nccl().Send(nullptr, 0, Type::kInt8, 0, nullptr, nullptr);
           }).Wait(),
           -SIGKILL);
}

bool LeavesSharedMemory() {
  bool leaves = false;
  DIR* const folder = opendir("/dev/shm");
  while (const dirent* const entry = folder == nullptr ? nullptr : readdir(folder)) {
    leaves |= std::string(entry->d_name).find("fake") != std::string::npos;
  }
  if (folder != nullptr) closedir(folder);
  return leaves;
}

TEST_ALONE(processes_compute_together_and_leave_nothing, EXIT_SUCCESS) {
  const auto body = [](Rank r) {
    constexpr size_t kCount = 300000;  // more than one page of anything
    const auto value = [](int rank, size_t i) {
      return static_cast<int32_t>(rank * 1000 + i % 977);
    };
    const int left = (r.rank + kSize - 1) % kSize, right = (r.rank + 1) % kSize;
    std::vector<int32_t> mine, sum(kCount), received(kCount);
    for (size_t i = 0; i < kCount; ++i) mine.push_back(value(r.rank, i));
    Nccl().AllReduce(mine.data(), sum.data(), kCount, Type::kInt32, RedOp::kSum, r.comm,
                     r.stream());
    Nccl().GroupStart();
    Nccl().Send(mine.data(), kCount, Type::kInt32, right, r.comm, r.stream());
    Nccl().Recv(received.data(), kCount, Type::kInt32, left, r.comm, r.stream());
    Nccl().GroupEnd();
    r.on->Synchronize();
    for (size_t i = 0; i < kCount; i += 101) {
      CHECK_EQ(sum[i], value(0, i) + value(1, i) + value(2, i));
      CHECK_EQ(received[i], value(left, i));
    }
    nccl::Comm child = nullptr;
    CHECK_EQ(Nccl().CommSplit(r.comm, r.rank == 0 ? 1 : 0, 0, &child, nullptr),
             kSuccess);
    int32_t one = 1;
    Sum(child, r.stream(), &one);
    r.on->Synchronize();
    CHECK_EQ(one, r.rank == 0 ? 1 : 2);
    CHECK_EQ(Nccl().CommDestroy(child), kSuccess);
  };
  CHECK_TRUE(RunProcesses(body) == kAllWell);
  CHECK_TRUE(!LeavesSharedMemory());
}

TEST_ALONE(ranks_may_be_threads_of_several_processes, EXIT_SUCCESS) {
  const nccl::UniqueId id = NewId();
  const auto process = [&](int number) {
    ForRanks(2, [&](int device) {
      const auto body = [](Rank r) {
        int32_t value = 1 << r.rank;
        CHECK_EQ(SumOf(r, &value), kSuccess);
        r.on->Synchronize();
        CHECK_EQ(value, 15);
      };
      RunRank(id, number * 2 + device, 4, body, device);
    });
  };
  Child first([&] { process(0); }), second([&] { process(1); });
  CHECK_EQ(first.Wait(), EXIT_SUCCESS);
  CHECK_EQ(second.Wait(), EXIT_SUCCESS);
}

TEST_ALONE(devices_of_processes_can_be_one_gpu, EXIT_SUCCESS) {
  setenv("JAXCOMM_FAKE_ONE_GPU", "1", 1);
  const nccl::UniqueId id = NewId();
  const auto process = [&](int rank) {
    OnDevice on(0);
    nccl::Comm comm = nullptr;
    nccl::Config config = NewConfig();
    CHECK_EQ(Nccl().CommInitRankConfig(&comm, 2, id, rank, &config),
             nccl::kInvalidUsage);
    CHECK_CONTAINS(Nccl().GetLastError(nullptr), "Duplicate GPU detected");
  };
  Child first([&] { process(0); }), second([&] { process(1); });
  CHECK_EQ(first.Wait(), EXIT_SUCCESS);
  CHECK_EQ(second.Wait(), EXIT_SUCCESS);
}

// NCCL's kernels within a host behave so: only an abort ends them, and they wrote
// nothing.
TEST_ALONE(nobody_is_told_of_a_dead_process_in_an_operation, EXIT_SUCCESS) {
  int made[2];
  CHECK_EQ(pipe(made), 0);
  const std::vector<int> statuses = RunProcesses([&](Rank r) {
    char byte = 0;
    if (r.rank == 1) {
      // Whoever still makes its communicator would be told.
      for (int other = 0; other < kSize - 1; ++other)
        CHECK_EQ(read(made[0], &byte, 1), 1);
      raise(SIGKILL);
    }
    CHECK_EQ(write(made[1], &byte, 1), 1);
    int32_t value = 1;
    CHECK_EQ(SumOf(r, &value), kSuccess);
    LetOthersRun();
    CHECK_EQ(AsyncErrorOf(r.comm), kSuccess);
    CHECK_EQ(Nccl().CommAbort(r.comm), kSuccess);
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);
    CHECK_EQ(value, 1);
  });
  CHECK_TRUE((statuses == std::vector<int>{EXIT_SUCCESS, -SIGKILL, EXIT_SUCCESS}));
}

TEST_ALONE(processes_that_disagree_have_an_asynchronous_error, EXIT_SUCCESS) {
  CHECK_TRUE(RunProcesses([](Rank r) {
               int32_t value = 1;
               Nccl().Broadcast(&value, &value, 1, Type::kInt32, r.rank == 2 ? 1 : 0,
                                r.comm, r.stream());
               CHECK_TRUE(Until([&] { return AsyncErrorOf(r.comm) != kSuccess; }));
               CHECK_CONTAINS(Nccl().GetLastError(r.comm), "root 0 against 1");
               CHECK_EQ(Nccl().CommAbort(r.comm), kSuccess);
             }) == kAllWell);
}

}  // namespace
}  // namespace jaxcomm::testing
