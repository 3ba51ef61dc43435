// The stand-in for libnccl and libcuda, loaded as the backend loads the real ones, and
// ranks that use it from threads.
#ifndef JAXCOMM_TESTS_FFI_FAKE_NCCL_H_
#define JAXCOMM_TESTS_FFI_FAKE_NCCL_H_

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/library/library.h"
#include "tests/doubles/nccl/controls.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {

struct Fake {
  nccl::Api nccl;
  cuda::Api cuda;
  decltype(&jaxcommFakeTrace) trace = nullptr;
  decltype(&jaxcommFakeClearTrace) clear_trace = nullptr;
  decltype(&jaxcommFakeFail) fail = nullptr;
  decltype(&jaxcommFakeHang) hang = nullptr;
  decltype(&jaxcommFakeAsyncError) async_error = nullptr;
  decltype(&jaxcommFakeConnect) connect = nullptr;
  decltype(&jaxcommFakeMayFail) may_fail = nullptr;
  decltype(&jaxcommFakeForgetFaults) forget_faults = nullptr;
  decltype(&jaxcommFakeMisuse) misuse = nullptr;
  decltype(&jaxcommFakeOpen) open = nullptr;
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
  Take(library, "jaxcommFakeTrace", &fake.trace);
  Take(library, "jaxcommFakeClearTrace", &fake.clear_trace);
  Take(library, "jaxcommFakeFail", &fake.fail);
  Take(library, "jaxcommFakeHang", &fake.hang);
  Take(library, "jaxcommFakeAsyncError", &fake.async_error);
  Take(library, "jaxcommFakeConnect", &fake.connect);
  Take(library, "jaxcommFakeMayFail", &fake.may_fail);
  Take(library, "jaxcommFakeForgetFaults", &fake.forget_faults);
  Take(library, "jaxcommFakeMisuse", &fake.misuse);
  Take(library, "jaxcommFakeOpen", &fake.open);
  Take(library, "jaxcommFakeSetCapturing", &fake.set_capturing);
  Take(library, "jaxcommFakeEndGraphs", &fake.end_graphs);
  fake.cuda.Init(0);
  // Whoever breaks a rule of NCCL or CUDA is seen in each program.
  AfterEach().push_back(
      [misuse = fake.misuse] { CHECK_EQ(std::string(misuse()), ""); });
  return fake;
#endif
}

inline const Fake& TheFake() {
  static const Fake fake = LoadFake();
  return fake;
}
inline const nccl::Api& Nccl() { return TheFake().nccl; }
inline const cuda::Api& Cuda() { return TheFake().cuda; }

// The stand-in as the backend holds it.
inline NcclLibrary MakeLibrary() {
  NcclLibrary made;
  made.nccl = Nccl();
  made.cuda = Cuda();
  made.version = 23200;
  return made;
}
inline const NcclLibrary& Library() {
  static const NcclLibrary library = MakeLibrary();
  return library;
}

// The calls of a function in the trace.
inline int Count(const std::string& name) {
  const std::string trace = TheFake().trace(), wanted = "\"" + name + "\"";
  int count = 0;
  for (size_t at = 0; (at = trace.find(wanted, at)) != std::string::npos; ++at) ++count;
  return count;
}

// A device made current for this thread, and a stream on it.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    Cuda().DevicePrimaryCtxRetain(&context, device);
    Cuda().CtxPushCurrent(context);
    Cuda().StreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, 0);
  }
  ~OnDevice() {
    Cuda().StreamDestroy(stream);
    if (std::this_thread::get_id() == thread_) Cuda().CtxPopCurrent(nullptr);
    Cuda().DevicePrimaryCtxRelease(device_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cuda::Result Synchronize() const { return Cuda().StreamSynchronize(stream); }

  cuda::Stream stream = nullptr;
  cuda::Context context = nullptr;

 private:
  const int device_;
  const std::thread::id thread_ = std::this_thread::get_id();
};

// What streams wait for until the test lets them go.
class Gate {
 public:
  void Hold(cuda::Stream stream) {
    Cuda().LaunchHostFunc(
        stream, [](void* gate) { static_cast<Gate*>(gate)->opened_.Wait(); }, this);
  }
  void Open() { opened_.Set(); }

 private:
  Event opened_;
};

// A point of a stream's work. It must live until the stream is there.
class Milestone {
 public:
  explicit Milestone(cuda::Stream stream) {
    Cuda().LaunchHostFunc(
        stream, [](void* self) { static_cast<Milestone*>(self)->passed_.Set(); }, this);
  }
  bool passed() const { return passed_.is_set(); }

 private:
  Event passed_;
};

inline nccl::UniqueId NewId() {
  nccl::UniqueId id;
  Nccl().GetUniqueId(&id);
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
  nccl::Result Abort() { return Nccl().CommAbort(std::exchange(comm, nullptr)); }
};

// One rank, from creation to `body` to destruction, unless the body aborts it.
inline void RunRank(const nccl::UniqueId& id, int rank, int size,
                    const std::function<void(Rank&)>& body, int device) {
  OnDevice on(device);
  nccl::Comm comm = nullptr;
  nccl::Config config = NewConfig();
  const nccl::Result result = Nccl().CommInitRankConfig(&comm, size, id, rank, &config);
  if (result != nccl::kSuccess) {
    std::fprintf(stderr, "rank %d: %s\n", rank, Nccl().GetLastError(nullptr));
    std::exit(EXIT_FAILURE);
  }
  Rank made{rank, size, comm, &on};
  body(made);
  if (made.comm != nullptr && Nccl().CommDestroy(comm) != nccl::kSuccess) made.Abort();
}

// The same for all ranks at once, each in a thread, on the device of its number.
inline void RunRanks(int size, const std::function<void(Rank&)>& body) {
  const nccl::UniqueId id = NewId();
  ForRanks(size, [&](int rank) { RunRank(id, rank, size, body, rank); });
}

// Sums the ranks' `value`s in one element.
inline nccl::Result Sum(nccl::Comm comm, nccl::Stream stream, int32_t* value) {
  return Nccl().AllReduce(value, value, 1, nccl::Type::kInt32, nccl::RedOp::kSum, comm,
                          stream);
}

inline nccl::Result AsyncErrorOf(nccl::Comm comm) {
  nccl::Result error = nccl::kSuccess;
  Nccl().CommGetAsyncError(comm, &error);
  return error;
}

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_FAKE_NCCL_H_
