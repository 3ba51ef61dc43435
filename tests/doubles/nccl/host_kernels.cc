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
HostKernel OneShot(const char* const (&names)[kNumOneShotWords], OneShotWord word) {
  return Kernel<OneShotArguments, kKernel>(names[static_cast<int>(word)], true);
}

}  // namespace

const HostKernel* FindHostKernel(const std::string& name) {
  static const HostKernel kernels[] = {
      OneShot<jaxcomm_lines_int32>(kLineKernels, OneShotWord::kInt32),
      OneShot<jaxcomm_lines_float32>(kLineKernels, OneShotWord::kFloat32),
      OneShot<jaxcomm_lines_float16>(kLineKernels, OneShotWord::kFloat16),
      OneShot<jaxcomm_lines_bfloat16>(kLineKernels, OneShotWord::kBfloat16),
      OneShot<jaxcomm_lines_moved>(kLineKernels, OneShotWord::kMoved),
      OneShot<jaxcomm_staged_int32>(kStagedKernels, OneShotWord::kInt32),
      OneShot<jaxcomm_staged_float32>(kStagedKernels, OneShotWord::kFloat32),
      OneShot<jaxcomm_staged_float16>(kStagedKernels, OneShotWord::kFloat16),
      OneShot<jaxcomm_staged_bfloat16>(kStagedKernels, OneShotWord::kBfloat16),
      OneShot<jaxcomm_staged_moved>(kStagedKernels, OneShotWord::kMoved),
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
