// The code of the kernels of OneShotArguments. Part of kernels.cu.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_ONE_SHOT_DEVICE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_ONE_SHOT_DEVICE_H_

#include "ffi/backends/nccl/kernels/kernels.h"
#include "ffi/backends/nccl/kernels/word_sums.h"

namespace jaxcomm {
namespace {

// How often a thread that waits for other ranks asks whether it should stop: the answer
// is in host memory, a microsecond or more away.
constexpr uint32_t kTurnsPerStop = 1024;

// In front of a loop over words, which NVRTC would write down several times.
#ifdef __CUDACC__
#define JAXCOMM_ROLLED _Pragma("unroll 1")
#else
#define JAXCOMM_ROLLED
#endif

__device__ uint64_t AddressOf(uint64_t address, uint32_t words) {
  return address + uint64_t{words} * sizeof(uint32_t);
}

__device__ bool IsHop(const OneShotArguments& arguments) {
  return arguments.target != OneShotArguments::kAll;
}

// The words of the operand's part for a rank.
__device__ uint32_t WordsFor(const OneShotArguments& arguments, uint32_t rank) {
  const uint32_t at = rank * arguments.from_stride;
  const uint32_t left = arguments.words > at ? arguments.words - at : 0;
  return left < arguments.part ? left : arguments.part;
}

// The ranks that this one sends to, as they come after it: so no two begin with one.
__device__ uint32_t RankAfter(const OneShotArguments& arguments, uint32_t distance) {
  const uint32_t rank = arguments.rank + distance;
  return rank < arguments.ranks ? rank : rank - arguments.ranks;
}

__device__ bool IsStopped(const OneShotArguments& arguments, uint32_t turns) {
  return turns % kTurnsPerStop == 0 &&
         LoadRelaxed(reinterpret_cast<const uint32_t*>(arguments.stop)) != 0;
}

// They tell the host where the work is. Writes to host memory are on their way while
// the kernel goes on: they cost it nothing, unlike an event, which streams do in
// between.
__device__ void TellBegun(const OneShotArguments& arguments) {
  auto* const progress = reinterpret_cast<OneShotProgress*>(arguments.progress);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    StoreRelaxed(&progress->began, arguments.flag);
  }
}
__device__ void TellEnded(const OneShotArguments& arguments, uint32_t flag) {
  auto* const progress = reinterpret_cast<OneShotProgress*>(arguments.progress);
  __syncthreads();  // the last of the block tells
  for (uint32_t i = blockIdx.x + threadIdx.x * gridDim.x; i < OneShotProgress::kEnds;
       i += blockDim.x * gridDim.x) {
    StoreRelaxed(&progress->ended[i], flag);
  }
}

__device__ uint64_t Line(uint32_t word, uint32_t flag) {
  return static_cast<uint64_t>(flag) << 32 | word;
}
__device__ uint32_t WordOf(uint64_t line) { return static_cast<uint32_t>(line); }
__device__ uint32_t FlagOf(uint64_t line) { return static_cast<uint32_t>(line >> 32); }

// ---- lines

__device__ void SendLines(const OneShotArguments& arguments, uint32_t first,
                          uint32_t grid) {
  const auto* const operand = reinterpret_cast<const uint32_t*>(arguments.operand);
  // Lines in front of this rank's box in the half of an inbox.
  const uint32_t box =
      ((arguments.flag & 1) * arguments.ranks + arguments.rank) * arguments.capacity;
  JAXCOMM_ROLLED
  for (uint32_t i = first; i < arguments.part; i += grid) {
    for (uint32_t distance = 1; distance < kMostRanks; ++distance) {
      if (distance >= arguments.ranks) continue;
      const uint32_t to = RankAfter(arguments, distance);
      if (IsHop(arguments) && to != arguments.target && i > 0) continue;
      StoreRelaxed(reinterpret_cast<uint64_t*>(arguments.inboxes[to]) + box + i,
                   Line(operand[to * arguments.from_stride + i], arguments.flag));
    }
  }
}

// Takes a word of each other rank, once they are there. Returns false if it is to stop.
__device__ bool TakeLines(const OneShotArguments& arguments, uint32_t i,
                          uint32_t (&words)[kMostRanks]) {
  const auto* const inbox =
      reinterpret_cast<const uint64_t*>(arguments.inboxes[arguments.rank]) +
      (arguments.flag & 1) * arguments.ranks * arguments.capacity + i;
  const auto is_awaited = [&](uint32_t rank) {
    return rank < arguments.ranks && rank != arguments.rank &&
           (!IsHop(arguments) || rank == arguments.source || i == 0);
  };
  uint64_t lines[kMostRanks] = {};
  for (uint32_t turns = 1;; ++turns) {
    // All loads first: they are under way together.
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      if (!is_awaited(rank)) continue;
      lines[rank] = LoadRelaxed(inbox + rank * arguments.capacity);
    }
    bool are_here = true;
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      are_here &= !is_awaited(rank) || FlagOf(lines[rank]) == arguments.flag;
    }
    if (are_here) break;
    if (IsStopped(arguments, turns)) return false;
  }
  for (uint32_t rank = 0; rank < kMostRanks; ++rank) words[rank] = WordOf(lines[rank]);
  return true;
}

// A thread sends its words to the other ranks, and then takes what it finds in its own
// inbox. Words of the operand are read before the same thread writes there.
__device__ void DoLines(const OneShotArguments& arguments) {
  const uint32_t own = arguments.rank;
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t grid = gridDim.x * blockDim.x;
  const auto* const operand = reinterpret_cast<const uint32_t*>(arguments.operand);
  auto* const result = reinterpret_cast<uint32_t*>(arguments.result);
  TellBegun(arguments);
  SendLines(arguments, first, grid);
  JAXCOMM_ROLLED
  for (uint32_t i = first; i < arguments.part; i += grid) {
    uint32_t words[kMostRanks];
    if (!TakeLines(arguments, i, words)) return;
    if (!IsHop(arguments)) {
      const uint32_t word = operand[own * arguments.from_stride + i];
      for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
        if (rank == own) words[rank] = word;
      }
    }
    if (arguments.word != OneShotWord::kMoved) {
      result[i] = AddWords(arguments, words);
      continue;
    }
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      const bool is_taken =
          IsHop(arguments) ? rank == arguments.source : rank < arguments.ranks;
      if (is_taken) result[rank * arguments.to_stride + i] = words[rank];
    }
  }
}

// ---- staged

// What a thread moves at once.
struct alignas(16) Quad {
  uint32_t words[4];
};
constexpr uint32_t kQuad = 4;  // words

// The words of a thread begin here, and are a grid apart, in each step and on every
// rank: it reads words of the operand before it writes there.
__device__ uint32_t FirstWord() {
  return kQuad * (blockIdx.x * blockDim.x + threadIdx.x);
}
__device__ uint32_t WordsOfGrid() { return kQuad * gridDim.x * blockDim.x; }

__device__ Quad Load(uint64_t from, uint32_t words) {
  return *reinterpret_cast<const Quad*>(AddressOf(from, words));
}
__device__ void Store(uint64_t to, uint32_t words, const Quad& quad) {
  *reinterpret_cast<Quad*>(AddressOf(to, words)) = quad;
}

// The half of the memory of `rank` that is staged to in a step. A hop has it for
// itself.
__device__ uint64_t HalfOf(const OneShotArguments& arguments, uint32_t step,
                           uint32_t rank) {
  const uint64_t half = step * 2 + (arguments.flag & 1);
  return arguments.inboxes[rank] + half * OneShotMemory::kHalfBytes;
}

// What `from` stages for `to`.
__device__ uint64_t BoxOf(const OneShotArguments& arguments, uint32_t step,
                          uint32_t from, uint32_t to) {
  return AddressOf(HalfOf(arguments, step, to), from * arguments.capacity);
}

// A line for each block.
__device__ uint64_t* FlagAt(const OneShotArguments& arguments, uint32_t step,
                            uint32_t from, uint32_t to) {
  const uint32_t line =
      (step * kMostRanks + from) * OneShotProgress::kEnds + blockIdx.x;
  return reinterpret_cast<uint64_t*>(arguments.inboxes[to] +
                                     OneShotMemory::kStagedBytes) +
         line;
}

// Tells ranks that call different things apart.
__device__ uint32_t SignatureOf(const OneShotArguments& arguments) {
  return arguments.words << 6 | static_cast<uint32_t>(arguments.word) << 3 |
         uint32_t{IsHop(arguments)} << 2 | uint32_t{arguments.from_stride != 0} << 1 |
         uint32_t{arguments.to_stride != 0};
}

// Tells the block of the same number on all ranks what this one has staged.
__device__ void Tell(const OneShotArguments& arguments, uint32_t step, uint32_t flag) {
  const uint32_t own = arguments.rank;
  const uint64_t told = Line(SignatureOf(arguments), flag);
  __syncthreads();
  for (uint32_t rank = threadIdx.x; rank < arguments.ranks; rank += blockDim.x) {
    if (rank == own) continue;
    FenceSystem();
    StoreRelaxed(FlagAt(arguments, step, own, rank), told);
  }
}

// Waits until those blocks have told this one. Returns false if it is to stop. A rank
// that calls something else is waited for in vain.
__device__ bool Await(const OneShotArguments& arguments, uint32_t step, uint32_t flag) {
  const uint32_t own = arguments.rank;
  const uint64_t told = Line(SignatureOf(arguments), flag);
  bool is_stopped = false;
  for (uint32_t rank = threadIdx.x; rank < arguments.ranks; rank += blockDim.x) {
    if (rank == own) continue;
    const uint64_t* const line = FlagAt(arguments, step, rank, own);
    for (uint32_t turns = 1; !is_stopped; ++turns) {
      const uint64_t found = LoadAcquire(line);
      // Or at its next work. One that is further has gone on without this rank, and may
      // have staged over what it told.
      if (found == told || FlagOf(found) == flag + 1) break;
      is_stopped = IsStopped(arguments, turns);
    }
  }
  return !__syncthreads_or(is_stopped);
}

__device__ bool Meet(const OneShotArguments& arguments, uint32_t step) {
  Tell(arguments, step, arguments.flag);
  // Not before: the fence would wait for it, too.
  if (step == 0) TellBegun(arguments);
  return Await(arguments, step, arguments.flag);
}

__device__ void StageParts(const OneShotArguments& arguments) {
  const uint32_t own = arguments.rank;
  JAXCOMM_ROLLED
  for (uint32_t at = FirstWord(); at < arguments.part; at += WordsOfGrid()) {
    Quad quads[kMostRanks] = {};
    // All loads first: they are under way together.
    for (uint32_t distance = 1; distance < kMostRanks; ++distance) {
      if (distance >= arguments.ranks) continue;
      const uint32_t rank = RankAfter(arguments, distance);
      if (at >= WordsFor(arguments, rank)) continue;
      quads[distance] = Load(arguments.operand, rank * arguments.from_stride + at);
    }
    for (uint32_t distance = 1; distance < kMostRanks; ++distance) {
      if (distance >= arguments.ranks) continue;
      Store(BoxOf(arguments, 0, own, RankAfter(arguments, distance)), at,
            quads[distance]);
    }
  }
}

// Adds the parts of this rank, and stages the sum for all if they are to have it.
__device__ void AddParts(const OneShotArguments& arguments) {
  const uint32_t own = arguments.rank, words = WordsFor(arguments, own);
  JAXCOMM_ROLLED
  for (uint32_t at = FirstWord(); at < words; at += WordsOfGrid()) {
    Quad quads[kMostRanks] = {};
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      if (rank >= arguments.ranks) continue;
      quads[rank] = rank == own
                        ? Load(arguments.operand, own * arguments.from_stride + at)
                        : Load(BoxOf(arguments, 0, rank, own), at);
    }
    Quad sum = {};
    for (uint32_t k = 0; k < kQuad; ++k) {
      uint32_t each[kMostRanks] = {};
      for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
        each[rank] = quads[rank].words[k];
      }
      sum.words[k] = AddWords(arguments, each);
    }
    for (uint32_t distance = 1; distance < kMostRanks; ++distance) {
      if (distance >= arguments.ranks || arguments.is_shared == 0) continue;
      Store(BoxOf(arguments, 1, own, RankAfter(arguments, distance)), at, sum);
    }
    Store(arguments.result, own * arguments.to_stride + at, sum);
  }
}

// Puts the sums of the other ranks into the result. It is divided as the operand was.
__device__ void TakeSums(const OneShotArguments& arguments) {
  const uint32_t own = arguments.rank;
  JAXCOMM_ROLLED
  for (uint32_t at = FirstWord(); at < arguments.part; at += WordsOfGrid()) {
    Quad quads[kMostRanks] = {};
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      if (rank >= arguments.ranks || rank == own) continue;
      quads[rank] = Load(BoxOf(arguments, 1, rank, own), at);
    }
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      if (rank >= arguments.ranks || rank == own) continue;
      if (at >= WordsFor(arguments, rank)) continue;
      Store(arguments.result, rank * arguments.to_stride + at, quads[rank]);
    }
  }
}

__device__ void CopyPart(const OneShotArguments& arguments, uint64_t to,
                         uint64_t from) {
  constexpr uint32_t kAtOnce = 4;  // loads that are under way together
  const uint32_t grid = WordsOfGrid();
  JAXCOMM_ROLLED
  for (uint32_t at = FirstWord(); at < arguments.part; at += kAtOnce * grid) {
    Quad quads[kAtOnce] = {};
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      if (at + k * grid < arguments.part) quads[k] = Load(from, at + k * grid);
    }
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      if (at + k * grid < arguments.part) Store(to, at + k * grid, quads[k]);
    }
  }
}

__device__ void DoStaged(const OneShotArguments& arguments) {
  const uint32_t own = arguments.rank;
  if (IsHop(arguments)) {
    CopyPart(arguments, HalfOf(arguments, 0, arguments.target), arguments.operand);
    if (!Meet(arguments, 0)) return;
    CopyPart(arguments, arguments.result, HalfOf(arguments, 0, own));
    return;
  }
  StageParts(arguments);
  if (!Meet(arguments, 0)) return;
  AddParts(arguments);
  if (arguments.is_shared == 0 || !Meet(arguments, 1)) return;
  TakeSums(arguments);
}

}  // namespace
}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_ONE_SHOT_DEVICE_H_
