// The stand-in for libnccl and libcuda: streams and events, the trace, faults on demand
// and pretended capture.
#include "tests/ffi/check.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {
namespace {

using nccl::kSuccess;
using nccl::RedOp;
using nccl::Type;

const nccl::Api& Nccl() { return TheFake().nccl; }
const cuda::Api& Cuda() { return TheFake().cuda; }

constexpr auto kStreamCaptureUnsupported = static_cast<cuda::Result>(900);

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

nccl::Result Sum(Rank r, int32_t* value) {
  return Nccl().AllReduce(value, value, 1, Type::kInt32, RedOp::kSum, r.comm,
                          r.stream());
}

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
  Cuda().LaunchHostFunc(first.stream, &Gate::Wait, &gate);
  Cuda().MemsetD8Async(address, 5, 2, first.stream);
  Cuda().EventRecord(event, first.stream);
  CHECK_EQ(Cuda().EventQuery(event), cuda::kNotReady);
  CHECK_EQ(Cuda().StreamQuery(first.stream), cuda::kNotReady);
  Cuda().StreamWaitEvent(second.stream, event, 0);
  Cuda().MemcpyDtoDAsync(address + 2, address, 2, second.stream);
  CHECK_EQ(Cuda().StreamQuery(second.stream), cuda::kNotReady);
  gate.open = true;
  CHECK_EQ(second.Synchronize(), cuda::kSuccess);
  CHECK_EQ(int{data[3]}, 5);
  CHECK_EQ(Cuda().EventQuery(event), cuda::kSuccess);
  CHECK_EQ(Cuda().EventDestroy(event), cuda::kSuccess);
  CHECK_TRUE(Cuda().EventQuery(event) != cuda::kSuccess);
}

TEST(what_needs_a_context_fails_without_one) {
  cuda::Stream stream = nullptr;
  cuda::Context context = nullptr;
  CHECK_EQ(Cuda().CtxGetCurrent(&context), cuda::kSuccess);
  CHECK_TRUE(context == nullptr);
  CHECK_EQ(int{Cuda().StreamCreateWithPriority(&stream, 0, 0)}, 201);
  cuda::Pointer pointer = 0;
  CHECK_EQ(int{Cuda().MemAlloc(&pointer, 8)}, 201);
  OnDevice on(0);
  CHECK_EQ(Cuda().MemAlloc(&pointer, size_t{17} << 30), cuda::kOutOfMemory);
  CHECK_EQ(Cuda().MemAlloc(&pointer, 8), cuda::kSuccess);
  CHECK_EQ(Cuda().MemFree(pointer), cuda::kSuccess);
  CHECK_EQ(Cuda().MemFree(pointer), cuda::kInvalidValue);
}

TEST(a_host_function_may_not_call_cuda) {
  OnDevice on(0);
  struct Tried {
    cuda::Stream stream;
    cuda::Result result;
  } tried{on.stream, cuda::kSuccess};
  Cuda().LaunchHostFunc(
      on.stream,
      [](void* data) {
        auto* const tried = static_cast<Tried*>(data);
        tried->result = Cuda().StreamQuery(tried->stream);
      },
      &tried);
  on.Synchronize();
  CHECK_EQ(int{tried.result}, 800);
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
    CHECK_EQ(TraceLines("ncclSend").size(), 1u);
    CHECK_CONTAINS(TraceLines("ncclSend")[0], comm + ", \"stream\": ");
    CHECK_CONTAINS(TraceLines("ncclSend")[0],
                   "\"count\": 1, \"type\": 2, \"peer\": 0, \"group\": ");
    CHECK_EQ(TraceLines("\"launch\"").size(), 1u);
    CHECK_CONTAINS(TraceLines("\"launch\"")[0], comm + ", \"count\": 3");
    CHECK_EQ(TraceLines("ncclCommGetAsyncError").size(), 1u);
    CHECK_CONTAINS(TraceLines("ncclCommGetAsyncError")[0], "\"times\": 10");
  });
}

TEST(faults_come_when_they_were_asked_for) {
  RunRanks(1, [](Rank r) {
    int32_t value = 3;
    TheFake().fail("ncclAllReduce", 1, nccl::kSystemError);
    CHECK_EQ(Sum(r, &value), kSuccess);
    CHECK_EQ(Sum(r, &value), nccl::kSystemError);
    CHECK_EQ(Sum(r, &value), kSuccess);
    TheFake().fail("cuEventCreate", 0, 2);
    cuda::Event event = nullptr;
    CHECK_EQ(Cuda().EventCreate(&event, 0), cuda::kOutOfMemory);

    nccl::Comm child = nullptr;
    TheFake().fail("ncclCommSplit", 0, nccl::kInternalError);
    CHECK_EQ(Nccl().CommSplit(r.comm, 0, 0, &child, nullptr), nccl::kInternalError);

    // A split blocks if its parent does.
    nccl::Config config = NewConfig();
    config.blocking = 0;
    nccl::UniqueId id;
    nccl::Comm parent = nullptr;
    CHECK_EQ(Nccl().GetUniqueId(&id), kSuccess);
    CHECK_EQ(Nccl().CommInitRankConfig(&parent, 1, id, 0, &config), nccl::kInProgress);
    while (AsyncErrorOf(parent) == nccl::kInProgress) std::this_thread::yield();
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
    CHECK_EQ(Sum(r, &value), kSuccess);
    CHECK_EQ(Sum(r, &value), kSuccess);
    CHECK_EQ(Cuda().StreamQuery(r.stream()), cuda::kNotReady);
    CHECK_EQ(AsyncErrorOf(r.comm), kSuccess);
    const auto number = static_cast<int64_t>(reinterpret_cast<uintptr_t>(r.comm));
    CHECK_EQ(TheFake().async_error(number, nccl::kRemoteError), 1);
    CHECK_EQ(AsyncErrorOf(r.comm), nccl::kRemoteError);
    CHECK_EQ(Sum(r, &value), nccl::kRemoteError);
    CHECK_EQ(Nccl().CommAbort(r.comm), kSuccess);
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);
    CHECK_EQ(TheFake().async_error(number, nccl::kRemoteError), 0);
  });
}

TEST(what_must_not_be_called_during_capture_fails_and_is_noted) {
  RunRanks(1, [](Rank r) {
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
    CHECK_EQ(Cuda().MemAlloc(&pointer, 8), kStreamCaptureUnsupported);
    CHECK_EQ(r.on->Synchronize(), kStreamCaptureUnsupported);
    CHECK_EQ(Nccl().CommRegister(r.comm, &value, 4, &handle),
             nccl::kUnhandledCudaError);
    CHECK_CONTAINS(Nccl().GetLastError(nullptr), "Cuda failure 900");
    CHECK_EQ(Nccl().CommSplit(r.comm, 0, 0, &child, &config),
             nccl::kUnhandledCudaError);
    CHECK_EQ(TraceLines("violation").size(), 4u);
    CHECK_EQ(Sum(r, &value), kSuccess);
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
    Cuda().EventDestroy(event);
  });
}

}  // namespace
}  // namespace jaxcomm::testing
