// The stand-in for libnccl and libcuda, loaded as the backend loads the real ones, and
// ranks that use it from threads.
#ifndef JAXCOMM_TESTS_FFI_FAKE_NCCL_H_
#define JAXCOMM_TESTS_FFI_FAKE_NCCL_H_

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ffi/backends/nccl/cuda_api.h"
#include "ffi/backends/nccl/nccl_api.h"
#include "ffi/backends/nccl/test_double.h"
#include "tests/doubles/nccl/controls.h"

namespace jaxcomm::testing {

struct Fake {
  nccl::Api nccl;
  cuda::Api cuda;
  decltype(&jaxcommFakeHas) has = nullptr;
  decltype(&jaxcommTestDouble) test_double = nullptr;
  decltype(&jaxcommFakeTrace) trace = nullptr;
  decltype(&jaxcommFakeClearTrace) clear_trace = nullptr;
  decltype(&jaxcommFakeFail) fail = nullptr;
  decltype(&jaxcommFakeHang) hang = nullptr;
  decltype(&jaxcommFakeAsyncError) async_error = nullptr;
  decltype(&jaxcommFakeSetCapturing) set_capturing = nullptr;
  decltype(&jaxcommFakeEndGraphs) end_graphs = nullptr;
};

template <typename Function>
void Take(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return;
  std::fprintf(stderr, "the stand-in does not export %s\n", name);
  std::exit(EXIT_FAILURE);
}

// Ends the program where the stand-in was not built.
inline Fake LoadFake() {
#ifndef JAXCOMM_FAKE_NCCL
  std::printf("skipped: built without the target jaxcomm_fake_nccl\n");
  std::exit(EXIT_SUCCESS);
#else
  void* const library = dlopen(JAXCOMM_FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(EXIT_FAILURE);
  }
  Fake fake;
#define JAXCOMM_TAKE(name, result, parameters) \
  Take(library, "nccl" #name, &fake.nccl.name.found);
  JAXCOMM_NCCL_REQUIRED(JAXCOMM_TAKE)
  JAXCOMM_NCCL_OPTIONAL(JAXCOMM_TAKE)
#undef JAXCOMM_TAKE
#define JAXCOMM_TAKE(exported, name, parameters) \
  Take(library, #exported, &fake.cuda.name.found);
  JAXCOMM_CUDA_FUNCTIONS(JAXCOMM_TAKE)
#undef JAXCOMM_TAKE
  Take(library, "jaxcommFakeHas", &fake.has);
  Take(library, kFindTestDouble, &fake.test_double);
  Take(library, "jaxcommFakeTrace", &fake.trace);
  Take(library, "jaxcommFakeClearTrace", &fake.clear_trace);
  Take(library, "jaxcommFakeFail", &fake.fail);
  Take(library, "jaxcommFakeHang", &fake.hang);
  Take(library, "jaxcommFakeAsyncError", &fake.async_error);
  Take(library, "jaxcommFakeSetCapturing", &fake.set_capturing);
  Take(library, "jaxcommFakeEndGraphs", &fake.end_graphs);
  fake.cuda.Init(0);
  return fake;
#endif
}

inline const Fake& TheFake() {
  static const Fake fake = LoadFake();
  return fake;
}

// A device made current, and a stream on it.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    cuda::Context context = nullptr;
    TheFake().cuda.DevicePrimaryCtxRetain(&context, device);
    TheFake().cuda.CtxPushCurrent(context);
    TheFake().cuda.StreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, 0);
  }
  ~OnDevice() {
    TheFake().cuda.StreamDestroy(stream);
    TheFake().cuda.CtxPopCurrent(nullptr);
    TheFake().cuda.DevicePrimaryCtxRelease(device_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cuda::Result Synchronize() const { return TheFake().cuda.StreamSynchronize(stream); }

  cuda::Stream stream = nullptr;

 private:
  const int device_;
};

// Something that a stream waits for until the test lets it go: LaunchHostFunc(stream,
// &Gate::Wait, &gate).
struct Gate {
  std::atomic<bool> open{false};
  static void Wait(void* gate) {
    while (!static_cast<Gate*>(gate)->open) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
};

inline nccl::UniqueId NewId() {
  nccl::UniqueId id;
  TheFake().nccl.GetUniqueId(&id);
  return id;
}

inline nccl::Config NewConfig() {
  nccl::Config config;
  config.size = sizeof(config);
  config.version = 23000;
  return config;
}

struct Rank {
  int rank;
  int size;
  nccl::Comm comm;
  OnDevice* on;
  nccl::Stream stream() const { return on->stream; }
};

// One rank, from creation to `body` to destruction.
inline void RunRank(const nccl::UniqueId& id, int rank, int size,
                    const std::function<void(Rank)>& body, int device) {
  OnDevice on(device);
  nccl::Comm comm = nullptr;
  nccl::Config config = NewConfig();
  const nccl::Result result =
      TheFake().nccl.CommInitRankConfig(&comm, size, id, rank, &config);
  if (result != nccl::kSuccess) {
    std::fprintf(stderr, "rank %d: %s\n", rank, TheFake().nccl.GetLastError(nullptr));
    std::exit(EXIT_FAILURE);
  }
  body({rank, size, comm, &on});
  // Fails harmlessly where the body destroyed it.
  if (TheFake().nccl.CommDestroy(comm) != nccl::kSuccess)
    TheFake().nccl.CommAbort(comm);
}

// The same for all ranks at once, each in a thread, on the device of its number.
inline void RunRanks(int size, const std::function<void(Rank)>& body) {
  const nccl::UniqueId id = NewId();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { RunRank(id, rank, size, body, rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

inline nccl::Result AsyncErrorOf(nccl::Comm comm) {
  nccl::Result error = nccl::kSuccess;
  TheFake().nccl.CommGetAsyncError(comm, &error);
  return error;
}

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_FAKE_NCCL_H_
