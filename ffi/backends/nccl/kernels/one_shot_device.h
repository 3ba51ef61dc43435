// The code of the kernels of OneShotArguments. Part of kernels.cu.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_ONE_SHOT_DEVICE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_ONE_SHOT_DEVICE_H_

#include "ffi/backends/nccl/kernels/kernels.h"

namespace jaxcomm {
namespace {

// How often a thread that waits for other ranks asks whether it should stop: the answer
// is in host memory, a microsecond or more away.
constexpr uint32_t kTurnsPerStop = 1024;

// Loops over ranks go to kMostRanks: NVRTC unrolls them, and words stay in registers.
constexpr uint32_t kMostRanks = OneShotArguments::kMostRanks;

// In front of a loop over words, which NVRTC would write down several times.
#ifdef __CUDACC__
#define JAXCOMM_ROLLED _Pragma("unroll 1")
#else
#define JAXCOMM_ROLLED
#endif

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

// Adds a word of each rank by the tree of jaxcomm/primitives/tree.py, as the host
// backend does: neighbours first, then their sums. A sum without a neighbour goes up as
// it is.
template <typename Sum>
__device__ uint32_t AddWords(const uint32_t* words, uint32_t ranks) {
  Sum sums[kMostRanks];
  for (uint32_t rank = 0; rank < kMostRanks; ++rank) sums[rank] = Sum::Of(words[rank]);
  for (uint32_t step = 1; step < kMostRanks; step *= 2) {
    for (uint32_t rank = 0; rank + step < kMostRanks; rank += 2 * step) {
      if (rank + step < ranks) sums[rank].Add(sums[rank + step]);
    }
  }
  return sums[0].Word();
}

// Nothing is added.
struct Moved {
  static __device__ uint32_t Sent(uint32_t word, float) { return word; }
};
template <typename Sum>
constexpr bool kIsAdded = true;
template <>
constexpr bool kIsAdded<Moved> = false;

__device__ uint64_t AddressOf(uint64_t address, uint32_t words) {
  return address + uint64_t{words} * sizeof(uint32_t);
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

// ---- lines

__device__ uint64_t Line(uint32_t word, uint32_t flag) {
  return static_cast<uint64_t>(flag) << 32 | word;
}
__device__ uint32_t WordOf(uint64_t line) { return static_cast<uint32_t>(line); }
__device__ uint32_t FlagOf(uint64_t line) { return static_cast<uint32_t>(line >> 32); }

// A thread sends its words to the other ranks, and then takes what it finds in its own
// inbox. The words of a thread are a grid apart. Words of the operand are read before
// the same thread writes there.
template <typename Sum>
__device__ void SendLines(const OneShotArguments& arguments) {
  const uint32_t ranks = arguments.ranks, flag = arguments.flag, own = arguments.rank;
  const uint32_t capacity = arguments.capacity;
  const auto* const operand = reinterpret_cast<const uint32_t*>(arguments.operand);
  auto* const result = reinterpret_cast<uint32_t*>(arguments.result);
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t grid = gridDim.x * blockDim.x;
  // Lines in front of this half of an inbox, and of this rank's box in it.
  const uint32_t half = (flag & 1) * ranks * capacity;
  const uint32_t box = half + own * capacity;
  const bool is_hop = arguments.target != OneShotArguments::kAll;
  const uint32_t own_from = own * arguments.from_stride;

  JAXCOMM_ROLLED
  for (uint32_t i = first; i < arguments.part; i += grid) {
    for (uint32_t distance = 1; distance < kMostRanks; ++distance) {
      if (distance >= ranks) continue;
      const uint32_t to = RankAfter(arguments, distance);
      if (is_hop && to != arguments.target && i > 0) continue;
      const uint32_t word =
          Sum::Sent(operand[to * arguments.from_stride + i], arguments.factor);
      StoreRelaxed(reinterpret_cast<uint64_t*>(arguments.inboxes[to]) + box + i,
                   Line(word, flag));
    }
  }

  const auto* const inbox =
      reinterpret_cast<const uint64_t*>(arguments.inboxes[own]) + half;
  JAXCOMM_ROLLED
  for (uint32_t i = first; i < arguments.part; i += grid) {
    uint64_t lines[kMostRanks] = {};
    const auto is_awaited = [&](uint32_t rank) {
      return rank < ranks && rank != own &&
             (!is_hop || rank == arguments.source || i == 0);
    };
    for (uint32_t turns = 1;; ++turns) {
      // All loads first: they are under way together.
      for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
        if (is_awaited(rank)) lines[rank] = LoadRelaxed(inbox + rank * capacity + i);
      }
      bool are_here = true;
      for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
        are_here &= !is_awaited(rank) || FlagOf(lines[rank]) == flag;
      }
      if (are_here) break;
      if (IsStopped(arguments, turns)) return;
    }
    if constexpr (kIsAdded<Sum>) {
      uint32_t words[kMostRanks] = {};
      for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
        words[rank] = rank == own ? Sum::Sent(operand[own_from + i], arguments.factor)
                                  : WordOf(lines[rank]);
      }
      result[i] = AddWords<Sum>(words, ranks);
    } else {
      if (!is_hop) result[own * arguments.to_stride + i] = operand[own_from + i];
      for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
        const bool is_taken = is_hop ? rank == arguments.source : rank < ranks;
        if (!is_taken || rank == own) continue;
        result[rank * arguments.to_stride + i] = WordOf(lines[rank]);
      }
    }
  }
}

// ---- staged

// What a thread moves at once.
struct alignas(16) Quad {
  static constexpr uint32_t kWords = 4;
  uint32_t words[kWords];
};
struct Single {
  static constexpr uint32_t kWords = 1;
  uint32_t words[kWords];
};

// Whether quads will do on this rank.
__device__ bool IsOfQuads(const OneShotArguments& arguments) {
  const uint32_t numbers =
      arguments.words | arguments.part | arguments.from_stride | arguments.to_stride;
  const uint64_t addresses = arguments.operand | arguments.result;
  return numbers % Quad::kWords == 0 && addresses % sizeof(Quad) == 0;
}

// The first word of a part that a thread moves in a turn. A block moves the same words
// on every rank, whatever it moves at once, and a thread the same in each step.
template <typename Unit>
__device__ uint32_t WordAt(uint32_t turn) {
  const uint32_t threads = blockDim.x, tile = Quad::kWords * threads;
  if constexpr (Unit::kWords == 1) {
    return (turn / Quad::kWords * gridDim.x + blockIdx.x) * tile +
           turn % Quad::kWords * threads + threadIdx.x;
  } else {
    return (turn * gridDim.x + blockIdx.x) * tile + threadIdx.x * Unit::kWords;
  }
}

template <typename Unit>
__device__ Unit Load(uint64_t from, uint32_t words) {
  return *reinterpret_cast<const Unit*>(AddressOf(from, words));
}
template <typename Unit>
__device__ void Store(uint64_t to, uint32_t words, const Unit& unit) {
  *reinterpret_cast<Unit*>(AddressOf(to, words)) = unit;
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

__device__ uint32_t* FlagAt(const OneShotArguments& arguments, uint32_t step,
                            uint32_t from, uint32_t to) {
  const uint32_t flag =
      (step * kMostRanks + from) * OneShotProgress::kEnds + blockIdx.x;
  return reinterpret_cast<uint32_t*>(
      AddressOf(arguments.inboxes[to] + OneShotMemory::kStagedBytes, flag));
}

// Tells the block of the same number on all ranks what this one has staged, and waits
// until they have told this one. Returns false if it is to stop.
__device__ bool Meet(const OneShotArguments& arguments, uint32_t step) {
  const uint32_t own = arguments.rank;
  __syncthreads();
  for (uint32_t rank = threadIdx.x; rank < arguments.ranks; rank += blockDim.x) {
    if (rank == own) continue;
    FenceSystem();
    StoreRelaxed(FlagAt(arguments, step, own, rank), arguments.flag);
  }
  bool is_stopped = false;
  for (uint32_t rank = threadIdx.x; rank < arguments.ranks; rank += blockDim.x) {
    if (rank == own) continue;
    const uint32_t* const flag = FlagAt(arguments, step, rank, own);
    // A rank may be at its next work.
    for (uint32_t turns = 1; !is_stopped && LoadRelaxed(flag) < arguments.flag;
         ++turns) {
      is_stopped = IsStopped(arguments, turns);
    }
    FenceSystem();
  }
  return !__syncthreads_or(is_stopped);
}

template <typename Sum, typename Unit>
__device__ Unit SentOf(const OneShotArguments& arguments, uint32_t rank, uint32_t at) {
  Unit unit = Load<Unit>(arguments.operand, rank * arguments.from_stride + at);
  for (uint32_t& word : unit.words) word = Sum::Sent(word, arguments.factor);
  return unit;
}

template <typename Sum, typename Unit>
__device__ void StageParts(const OneShotArguments& arguments) {
  const uint32_t own = arguments.rank;
  JAXCOMM_ROLLED
  for (uint32_t turn = 0; WordAt<Unit>(turn) < arguments.part; ++turn) {
    const uint32_t at = WordAt<Unit>(turn);
    Unit units[kMostRanks] = {};
    // All loads first: they are under way together.
    for (uint32_t distance = 1; distance < kMostRanks; ++distance) {
      if (distance >= arguments.ranks) continue;
      const uint32_t rank = RankAfter(arguments, distance);
      if (at >= WordsFor(arguments, rank)) continue;
      units[distance] = SentOf<Sum, Unit>(arguments, rank, at);
    }
    for (uint32_t distance = 1; distance < kMostRanks; ++distance) {
      if (distance >= arguments.ranks) continue;
      Store(BoxOf(arguments, 0, own, RankAfter(arguments, distance)), at,
            units[distance]);
    }
    if constexpr (!kIsAdded<Sum>) {
      Store(arguments.result, own * arguments.to_stride + at,
            SentOf<Sum, Unit>(arguments, own, at));
    }
  }
}

// Adds the parts of this rank, and stages the sum for all if they are to have it.
template <typename Sum, typename Unit>
__device__ void AddParts(const OneShotArguments& arguments) {
  const uint32_t own = arguments.rank, words = WordsFor(arguments, own);
  JAXCOMM_ROLLED
  for (uint32_t turn = 0; WordAt<Unit>(turn) < words; ++turn) {
    const uint32_t at = WordAt<Unit>(turn);
    Unit units[kMostRanks] = {};
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      if (rank >= arguments.ranks) continue;
      units[rank] = rank == own ? SentOf<Sum, Unit>(arguments, own, at)
                                : Load<Unit>(BoxOf(arguments, 0, rank, own), at);
    }
    Unit sum = {};
    for (uint32_t k = 0; k < Unit::kWords; ++k) {
      uint32_t each[kMostRanks] = {};
      for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
        each[rank] = units[rank].words[k];
      }
      sum.words[k] = AddWords<Sum>(each, arguments.ranks);
    }
    for (uint32_t distance = 1; distance < kMostRanks; ++distance) {
      if (distance >= arguments.ranks || arguments.is_shared == 0) continue;
      Store(BoxOf(arguments, 1, own, RankAfter(arguments, distance)), at, sum);
    }
    Store(arguments.result, own * arguments.to_stride + at, sum);
  }
}

// Puts what the other ranks have staged in a step into the result. A sum is divided as
// its operand was.
template <typename Unit>
__device__ void TakeParts(const OneShotArguments& arguments, uint32_t step) {
  const uint32_t own = arguments.rank;
  JAXCOMM_ROLLED
  for (uint32_t turn = 0; WordAt<Unit>(turn) < arguments.part; ++turn) {
    const uint32_t at = WordAt<Unit>(turn);
    Unit units[kMostRanks] = {};
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      if (rank >= arguments.ranks || rank == own) continue;
      units[rank] = Load<Unit>(BoxOf(arguments, step, rank, own), at);
    }
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
      if (rank >= arguments.ranks || rank == own) continue;
      if (arguments.is_shared != 0 && at >= WordsFor(arguments, rank)) continue;
      Store(arguments.result, rank * arguments.to_stride + at, units[rank]);
    }
  }
}

template <typename Unit>
__device__ void CopyPart(const OneShotArguments& arguments, uint64_t to,
                         uint64_t from) {
  constexpr uint32_t kAtOnce = 4;  // loads that are under way together
  JAXCOMM_ROLLED
  for (uint32_t turn = 0; WordAt<Unit>(turn) < arguments.part; turn += kAtOnce) {
    Unit units[kAtOnce] = {};
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t at = WordAt<Unit>(turn + k);
      if (at < arguments.part) units[k] = Load<Unit>(from, at);
    }
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t at = WordAt<Unit>(turn + k);
      if (at < arguments.part) Store(to, at, units[k]);
    }
  }
}

template <typename Sum, typename Unit>
__device__ void SendStaged(const OneShotArguments& arguments) {
  const uint32_t own = arguments.rank;
  if constexpr (kIsAdded<Sum>) {
    StageParts<Sum, Unit>(arguments);
    if (!Meet(arguments, 0)) return;
    AddParts<Sum, Unit>(arguments);
    if (arguments.is_shared == 0 || !Meet(arguments, 1)) return;
    TakeParts<Unit>(arguments, 1);
  } else if (arguments.target == OneShotArguments::kAll) {
    StageParts<Sum, Unit>(arguments);
    if (!Meet(arguments, 0)) return;
    TakeParts<Unit>(arguments, 0);
  } else {
    CopyPart<Unit>(arguments, HalfOf(arguments, 0, arguments.target),
                   arguments.operand);
    if (!Meet(arguments, 0)) return;
    CopyPart<Unit>(arguments, arguments.result, HalfOf(arguments, 0, own));
  }
}

// ---- both

// They tell the host where the work is. Writes to host memory are on their way while
// the kernel goes on: they cost it nothing, unlike an event, which streams do in
// between.
__device__ void TellBegun(const OneShotArguments& arguments) {
  auto* const progress = reinterpret_cast<OneShotProgress*>(arguments.progress);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    StoreRelaxed(&progress->began, arguments.flag);
  }
}
__device__ void TellEnded(const OneShotArguments& arguments) {
  auto* const progress = reinterpret_cast<OneShotProgress*>(arguments.progress);
  __syncthreads();  // the last of the block tells
  for (uint32_t i = blockIdx.x + threadIdx.x * gridDim.x; i < OneShotProgress::kEnds;
       i += blockDim.x * gridDim.x) {
    StoreRelaxed(&progress->ended[i], arguments.flag);
  }
}

template <typename Sum>
__device__ void DoLines(const OneShotArguments& arguments) {
  TellBegun(arguments);
  SendLines<Sum>(arguments);
  TellEnded(arguments);
}

template <typename Sum>
__device__ void DoStaged(const OneShotArguments& arguments) {
  TellBegun(arguments);
  if (IsOfQuads(arguments)) {
    SendStaged<Sum, Quad>(arguments);
  } else {
    SendStaged<Sum, Single>(arguments);
  }
  TellEnded(arguments);
}

#undef JAXCOMM_ROLLED

}  // namespace
}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_ONE_SHOT_DEVICE_H_
