// The package's kernels: who shares them, and what poison fills.
#include <algorithm>

#include "ffi/backends/nccl/kernels/device_kernels.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

std::shared_ptr<const DeviceKernels> Load(const OnDevice& on) {
  return Must(DeviceKernels::Load(Library(), on.context));
}

TEST(users_of_a_context_share_the_kernels) {
  const OnDevice zero(0), one(1);
  TheFake().clear_trace();
  auto first = Load(zero), second = Load(zero), other = Load(one);
  CHECK_TRUE(first == second);
  CHECK_TRUE(first != other);
  CHECK_EQ(Count("cuModuleLoadData"), 2);
  first = nullptr;
  CHECK_EQ(Count("cuModuleUnload"), 0);
  second = nullptr;
  CHECK_EQ(Count("cuModuleUnload"), 1);
}

TEST(poison_fills_any_length_at_any_address_after_a_failure_only) {
  const OnDevice zero(0);
  const auto kernels = Load(zero);
  uint32_t word = 0;
  PoisonArguments arguments;
  arguments.word = reinterpret_cast<uint64_t>(&word);
  arguments.count = PoisonArguments::kMostPoisoned;
  std::vector<uint8_t> memory(1 << 17, 5), wanted = memory;
  size_t at = 0, given = 0;
  for (size_t offset = 0; offset < 16; ++offset) {
    for (size_t bytes = 0; bytes < 40; ++bytes) {
      at = (at / 16 + 2) * 16 + offset;
      arguments.results[given++] = {reinterpret_cast<uint64_t>(memory.data() + at),
                                    bytes};
      std::fill_n(wanted.begin() + static_cast<ptrdiff_t>(at), bytes, 0xff);
      at += bytes;
      if (given < arguments.count) continue;
      word = 0;
      CHECK_OK(kernels->Poison(arguments, zero.stream));
      zero.Synchronize();
      CHECK_EQ(memory[at - 1], 5);
      word = 0x80000000;  // any but 0
      CHECK_OK(kernels->Poison(arguments, zero.stream));
      zero.Synchronize();
      given = 0;
    }
  }
  CHECK_EQ(given, size_t{0});
  CHECK_TRUE(memory == wanted);
}

}  // namespace
}  // namespace jaxcomm::testing
