// The package's GPU code. After a change run `make ptx`, which compiles it to
// kernels_ptx.inc.
//
// Tests compile this file for the host: what is not standard C++ here,
// tests/doubles/nccl/device_code.h must declare.
#include "ffi/backends/nccl/kernels/kernels.h"

#ifdef __CUDACC__
#include "ffi/backends/nccl/kernels/instructions.h"
#endif
#include "ffi/backends/nccl/kernels/ragged_device.h"

namespace jaxcomm {
namespace {

// How often a thread that waits for other ranks asks whether it should stop: the answer
// is in host memory, a microsecond or more away.
constexpr uint32_t kTurnsPerStop = 1024;

__device__ uint64_t Line(uint32_t word, uint32_t flag) {
  return static_cast<uint64_t>(flag) << 32 | word;
}
__device__ uint32_t WordOf(uint64_t line) { return static_cast<uint32_t>(line); }
__device__ uint32_t FlagOf(uint64_t line) { return static_cast<uint32_t>(line >> 32); }

// What words are added as. Sent() is the word that a rank sends for one of its operand,
// Of() what another rank makes of it.
struct Int32Sum {
  static __device__ uint32_t Sent(uint32_t word, float) { return word; }

  static __device__ Int32Sum Of(uint32_t word) { return {word}; }
  __device__ void Add(const Int32Sum& other) { sum += other.sum; }
  __device__ uint32_t Word() const { return sum; }

  uint32_t sum;
};

struct Float32Sum {
  static __device__ uint32_t Sent(uint32_t word, float factor) {
    return __float_as_uint(__uint_as_float(word) * factor);
  }

  static __device__ Float32Sum Of(uint32_t word) { return {__uint_as_float(word)}; }
  __device__ void Add(const Float32Sum& other) { sum += other.sum; }
  __device__ uint32_t Word() const { return __float_as_uint(sum); }

  float sum;
};

struct Float16 {
  static __device__ float Widen(uint32_t bits) {
    return WidenFloat16(static_cast<uint16_t>(bits));
  }
  static __device__ uint32_t Round(float value) { return RoundToFloat16(value); }
};

// sm_70 has no conversion of its own.
struct Bfloat16 {
  static __device__ float Widen(uint32_t bits) { return __uint_as_float(bits << 16); }
  // To nearest, ties to even.
  static __device__ uint32_t Round(float value) {
    if (value != value) return 0x7fc0;
    const uint32_t bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
};

// Two numbers a word.
template <typename Narrow>
struct NarrowSum {
  static __device__ uint32_t Sent(uint32_t word, float) { return word; }

  static __device__ NarrowSum Of(uint32_t word) {
    return {Narrow::Widen(word & 0xffff), Narrow::Widen(word >> 16)};
  }
  __device__ void Add(const NarrowSum& other) {
    low += other.low;
    high += other.high;
  }
  __device__ uint32_t Word() const {
    return Narrow::Round(high) << 16 | Narrow::Round(low);
  }

  float low, high;
};

// A thread sends its words to all ranks, itself included, and then adds what it finds
// in its own inbox. The words of a thread are a grid apart.
//
// Ranks are added by the tree of jaxcomm/primitives/tree.py, as the host backend does:
// neighbours first, then their sums. A sum without a neighbour goes up as it is.
//
// Loops over ranks go to kMostRanks: NVRTC unrolls them, and lines stay in registers.
template <typename Sum>
__device__ void SendAndAdd(const OneShotArguments& arguments) {
  constexpr uint32_t kMostRanks = OneShotArguments::kMostRanks;
  const uint32_t ranks = arguments.ranks, words = arguments.words;
  const uint32_t flag = arguments.flag, capacity = arguments.capacity;
  const auto* const operand = reinterpret_cast<const uint32_t*>(arguments.operand);
  auto* const result = reinterpret_cast<uint32_t*>(arguments.result);
  const auto* const stop = reinterpret_cast<const uint32_t*>(arguments.stop);
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t grid = gridDim.x * blockDim.x;
  // Lines in front of this half of an inbox, and of this rank's box in it.
  const uint32_t half = (flag & 1) * ranks * capacity;
  const uint32_t box = half + arguments.rank * capacity;

  for (uint32_t i = first; i < words; i += grid) {
    const uint64_t line = Line(Sum::Sent(operand[i], arguments.factor), flag);
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      if (rank >= ranks) continue;
      StoreRelaxed(reinterpret_cast<uint64_t*>(arguments.inboxes[rank]) + box + i,
                   line);
    }
  }

  const auto* const inbox =
      reinterpret_cast<const uint64_t*>(arguments.inboxes[arguments.rank]) + half;
  for (uint32_t i = first; i < words; i += grid) {
    uint64_t lines[kMostRanks] = {};
    for (uint32_t turns = 1;; ++turns) {
      // All loads first: they are under way together.
      for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
        if (rank < ranks) lines[rank] = LoadRelaxed(inbox + rank * capacity + i);
      }
      bool are_here = true;
      for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
        are_here &= rank >= ranks || FlagOf(lines[rank]) == flag;
      }
      if (are_here) break;
      if (turns % kTurnsPerStop == 0 && LoadRelaxed(stop) != 0) return;
    }
    Sum sums[kMostRanks];
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      sums[rank] = Sum::Of(WordOf(lines[rank]));
    }
    for (uint32_t step = 1; step < kMostRanks; step *= 2) {
      for (uint32_t rank = 0; rank + step < kMostRanks; rank += 2 * step) {
        if (rank + step < ranks) sums[rank].Add(sums[rank + step]);
      }
    }
    result[i] = sums[0].Word();
  }
}

// Also tells the host where it is. Writes to host memory are on their way while the
// kernel goes on: they cost it nothing, unlike an event, which streams do in between.
template <typename Sum>
__device__ void AddRanks(const OneShotArguments& arguments) {
  auto* const progress = reinterpret_cast<OneShotProgress*>(arguments.progress);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    StoreRelaxed(&progress->began, arguments.flag);
  }
  SendAndAdd<Sum>(arguments);
  __syncthreads();  // the last of the block tells
  for (uint32_t i = blockIdx.x + threadIdx.x * gridDim.x; i < OneShotProgress::kEnds;
       i += blockDim.x * gridDim.x) {
    StoreRelaxed(&progress->ended[i], arguments.flag);
  }
}

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
extern "C" __global__ void jaxcomm_sum_int32(
    const __grid_constant__ OneShotArguments arguments) {
  AddRanks<Int32Sum>(arguments);
}

extern "C" __global__ void jaxcomm_sum_float32(
    const __grid_constant__ OneShotArguments arguments) {
  AddRanks<Float32Sum>(arguments);
}

extern "C" __global__ void jaxcomm_sum_float16(
    const __grid_constant__ OneShotArguments arguments) {
  AddRanks<NarrowSum<Float16>>(arguments);
}

extern "C" __global__ void jaxcomm_sum_bfloat16(
    const __grid_constant__ OneShotArguments arguments) {
  AddRanks<NarrowSum<Bfloat16>>(arguments);
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
