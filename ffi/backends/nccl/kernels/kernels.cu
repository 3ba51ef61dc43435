// The package's GPU code. After a change run `make ptx`, which compiles it to
// kernels_ptx.inc.
//
// Tests compile this file for the host: what is not standard C++ here,
// tests/doubles/nccl/device_code.h must declare.
#include "ffi/backends/nccl/kernels/kernels.h"

#ifdef __CUDACC__
#include "ffi/backends/nccl/kernels/instructions.h"
#endif
#include "ffi/backends/nccl/kernels/exchange_device.h"
#include "ffi/backends/nccl/kernels/one_shot_device.h"
#include "ffi/backends/nccl/kernels/ragged_device.h"

namespace jaxcomm {
namespace {

// Fills memory with bytes of 0xff, by the threads of one block.
__device__ void Fill(uint64_t address, uint64_t bytes) {
  auto* const to = reinterpret_cast<uint8_t*>(address);
  const uint64_t before = (0 - address) % sizeof(Wide);
  const uint64_t head = before < bytes ? before : bytes;
  auto* const wide = reinterpret_cast<Wide*>(to + head);
  const uint64_t wides = (bytes - head) / sizeof(Wide);
  for (uint64_t i = threadIdx.x; i < head; i += blockDim.x) to[i] = 0xff;
  for (uint64_t i = threadIdx.x; i < wides; i += blockDim.x) {
    wide[i] = Wide{~uint64_t{0}, ~uint64_t{0}};
  }
  for (uint64_t i = head + wides * sizeof(Wide) + threadIdx.x; i < bytes;
       i += blockDim.x) {
    to[i] = 0xff;
  }
}

}  // namespace

// __grid_constant__: arguments are read where they are, with no copy for each thread.
// With so few registers four blocks share a multiprocessor.
extern "C" __global__ void __launch_bounds__(OneShotArguments::kMostThreads, 4)
    jaxcomm_lines(const __grid_constant__ OneShotArguments arguments) {
  DoLines(arguments);
  TellEnded(arguments, arguments.flag);
}

extern "C" __global__ void __launch_bounds__(OneShotArguments::kMostThreads, 4)
    jaxcomm_staged(const __grid_constant__ OneShotArguments arguments) {
  DoStaged(arguments);
  TellEnded(arguments, arguments.flag);
}

extern "C" __global__ void __launch_bounds__(ExchangeArguments::kMostThreads, 2)
    jaxcomm_exchange(const __grid_constant__ ExchangeArguments arguments) {
  if (arguments.of.ranks <= 4) {
    DoExchange<4>(arguments);
  } else {
    DoExchange<kMostRanks>(arguments);
  }
  TellEnded(arguments.of, arguments.of.flag + arguments.chunks - 1);
}

extern "C" __global__ void jaxcomm_stop(uint64_t address) {
  if (blockIdx.x == 0 && threadIdx.x == 0) LoadMisaligned(address + 1);
}

extern "C" __global__ void jaxcomm_poison(
    const __grid_constant__ PoisonArguments arguments) {
  // One thread reads host memory: 8,192 readers were measured to take 250 us.
  bool is_poisoned = false;
  if (threadIdx.x == 0) {
    is_poisoned = LoadRelaxed(reinterpret_cast<const uint32_t*>(arguments.word)) != 0;
  }
  if (!__syncthreads_or(is_poisoned)) return;
  for (uint32_t i = 0; i < arguments.count; ++i) {
    Fill(arguments.results[i].address, arguments.results[i].bytes);
  }
}

extern "C" __global__ void jaxcomm_ragged_give(
    const __grid_constant__ RaggedArguments arguments) {
  GiveNumbers(arguments);
}

extern "C" __global__ void jaxcomm_ragged_check(
    const __grid_constant__ RaggedArguments arguments) {
  CheckNumbers(arguments);
}

// With every bit set, the result of a call that was refused is NaN for floats. The last
// launch does it.
extern "C" __global__ void jaxcomm_ragged_move(
    const __grid_constant__ RaggedArguments arguments) {
  const auto* const verdict = reinterpret_cast<const uint32_t*>(arguments.verdict);
  if (*verdict == RaggedArguments::kFits) {
    MoveWindows(arguments);
  } else if (arguments.pushed == RaggedArguments::kNoWindow && blockIdx.x == 0) {
    Fill(arguments.result, arguments.output_rows * arguments.row_bytes);
  }
}

}  // namespace jaxcomm
