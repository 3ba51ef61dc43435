// kernels.cu, compiled for the host.
#include "tests/doubles/nccl/host_kernels.h"

#include <cstring>

#include "ffi/backends/nccl/kernels/kernels_ptx.inc"
#include "tests/doubles/nccl/device_code.h"
// Needs device_code.h before it.
#include "ffi/backends/nccl/kernels/kernels.cu"

namespace jaxcomm::fake {
namespace {

template <typename Arguments, void (*kKernel)(Arguments)>
HostKernel Kernel(const char* name, bool is_sum = false) {
  return {name, is_sum, sizeof(Arguments), [](const char* bytes) {
            Arguments arguments;
            std::memcpy(&arguments, bytes, sizeof(arguments));
            kKernel(arguments);
          }};
}

template <void (*kKernel)(OneShotArguments)>
HostKernel Sum(OneShotWord word) {
  return Kernel<OneShotArguments, kKernel>(kSumKernels[static_cast<int>(word)], true);
}

}  // namespace

const HostKernel* FindHostKernel(const std::string& name) {
  static const HostKernel kernels[] = {
      Sum<jaxcomm_sum_int32>(OneShotWord::kInt32),
      Sum<jaxcomm_sum_float32>(OneShotWord::kFloat32),
      Sum<jaxcomm_sum_float16>(OneShotWord::kFloat16),
      Sum<jaxcomm_sum_bfloat16>(OneShotWord::kBfloat16),
      Kernel<uint64_t, jaxcomm_stop>(kStopKernel),
      Kernel<PoisonArguments, jaxcomm_poison>(kPoisonKernel),
      Kernel<RaggedArguments, jaxcomm_ragged_give>(kRaggedGive),
      Kernel<RaggedArguments, jaxcomm_ragged_check>(kRaggedCheck),
      Kernel<RaggedArguments, jaxcomm_ragged_move>(kRaggedMove),
  };
  for (const HostKernel& kernel : kernels) {
    if (name == kernel.name) return &kernel;
  }
  return nullptr;
}

bool IsPtxOfKernels(const char* text) { return std::strcmp(text, kKernelsPtx) == 0; }

}  // namespace jaxcomm::fake
