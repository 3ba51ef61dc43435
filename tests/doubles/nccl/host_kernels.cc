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

}  // namespace

const HostKernel* FindHostKernel(const std::string& name) {
  static const HostKernel kernels[] = {
      Kernel<OneShotArguments, jaxcomm_lines>(kLinesKernel, true),
      Kernel<OneShotArguments, jaxcomm_staged>(kStagedKernel, true),
      Kernel<ExchangeArguments, jaxcomm_exchange>(kExchangeKernel, true),
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
