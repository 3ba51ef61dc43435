// The GPU kernels in CUDA contexts: loaded once, and launched.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/nccl/kernels/device_kernels.h"
#include "tests/ffi/check.h"
#include "tests/ffi/fake_library.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {
namespace {

struct Device {
  explicit Device(int ordinal) : number(ordinal), on(ordinal) {
    TheFake().cuda.DevicePrimaryCtxRetain(&context, number);
  }
  ~Device() { TheFake().cuda.DevicePrimaryCtxRelease(number); }

  const int number;
  OnDevice on;
  cuda::Context context = nullptr;
};

std::shared_ptr<const DeviceKernels> Load(const Device& device) {
  return Must(DeviceKernels::Load(Library(), device.context));
}

TEST(users_of_a_context_share_the_kernels) {
  const Device zero(0), one(1);
  TheFake().clear_trace();
  auto first = Load(zero), second = Load(zero), other = Load(one);
  CHECK_TRUE(first == second);
  CHECK_TRUE(first != other);
  CHECK_EQ(Count("cuModuleLoadData"), 2);
  first = nullptr;
  CHECK_EQ(Count("cuModuleUnload"), 0);
  second = nullptr;
  CHECK_EQ(Count("cuModuleUnload"), 1);
  first = Load(zero);
  CHECK_EQ(Count("cuModuleLoadData"), 3);
}

TEST(what_the_driver_refuses_is_told_and_tried_again) {
  const Device zero(0);
  for (const char* function : {"cuModuleLoadData", "cuModuleGetFunction"}) {
    TheFake().fail(function, 0, 222);
    const auto kernels = DeviceKernels::Load(Library(), zero.context);
    CHECK_CONTAINS(std::string(kernels.status().message()), function);
    CHECK_TRUE(Load(zero) != nullptr);
  }
}

TEST(the_driver_takes_no_other_code) {
  const Device zero(0);
  cuda::Module module = nullptr;
  CHECK_TRUE(TheFake().cuda.ModuleLoadData(&module, ".version 8.0\n") != 0);
}

TEST(sums_are_there_where_the_driver_has_them) {
  const Device zero(0);
  const auto kernels = Load(zero);
  for (int i = 0; i < kNumOneShotWords; ++i) {
    const auto word = static_cast<OneShotWord>(i);
    setenv("JAXCOMM_FAKE_KERNELS", "0", 1);
    CHECK_CONTAINS(std::string(kernels->FindSum(word).status().message()),
                   "cuModuleGetFunction");
    setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
    CHECK_TRUE(Must(kernels->FindSum(word)) != nullptr);
  }
}

TEST(poison_is_launched_behind_what_the_stream_has) {
  setenv("JAXCOMM_FAKE_KERNELS", "0", 1);
  const Device zero(0);
  const auto kernels = Load(zero);
  uint32_t word = 0;
  std::vector<int32_t> result(1000, 5), next(1, 5);
  PoisonArguments arguments;
  arguments.word = reinterpret_cast<uint64_t>(&word);
  arguments.count = 2;
  arguments.results[0] = {reinterpret_cast<uint64_t>(result.data() + 1), 998 * 4};
  arguments.results[1] = {reinterpret_cast<uint64_t>(next.data()), 4};
  CHECK_TRUE(kernels->Poison(arguments, zero.on.stream).success());
  zero.on.Synchronize();
  CHECK_TRUE(result == std::vector<int32_t>(1000, 5));

  Gate gate;
  TheFake().cuda.LaunchHostFunc(zero.on.stream, &Gate::Wait, &gate);
  CHECK_TRUE(kernels->Poison(arguments, zero.on.stream).success());
  arguments.count = 0;  // a launch copies its arguments
  __atomic_store_n(&word, 1u, __ATOMIC_RELAXED);
  gate.open = true;
  zero.on.Synchronize();
  std::vector<int32_t> wanted(1000, -1);
  wanted[0] = wanted[999] = 5;
  CHECK_TRUE(result == wanted);
  CHECK_EQ(next[0], -1);
}

}  // namespace
}  // namespace jaxcomm::testing
