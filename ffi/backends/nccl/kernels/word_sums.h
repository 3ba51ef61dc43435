// How the kernels of OneShotArguments add words. Part of kernels.cu.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_WORD_SUMS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_WORD_SUMS_H_

#include "ffi/backends/nccl/kernels/kernels.h"

namespace jaxcomm {
namespace {

// Loops over ranks go to kMostRanks: NVRTC unrolls them, and words stay in registers.
constexpr uint32_t kMostRanks = OneShotArguments::kMostRanks;

// What words are added as. A mean multiplies each before.
struct Int32Sum {
  static __device__ Int32Sum Of(uint32_t word, float) { return {word}; }
  __device__ void Add(const Int32Sum& other) { sum += other.sum; }
  __device__ uint32_t Word() const { return sum; }

  uint32_t sum;
};

struct Float32Sum {
  static __device__ Float32Sum Of(uint32_t word, float factor) {
    return {__uint_as_float(word) * factor};
  }
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
  static __device__ NarrowSum Of(uint32_t word, float) {
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
__device__ uint32_t AddWordsAs(const uint32_t* words, uint32_t ranks, float factor) {
  Sum sums[kMostRanks];
  for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
    sums[rank] = Sum::Of(words[rank], factor);
  }
  for (uint32_t step = 1; step < kMostRanks; step *= 2) {
    for (uint32_t rank = 0; rank + step < kMostRanks; rank += 2 * step) {
      if (rank + step < ranks) sums[rank].Add(sums[rank + step]);
    }
  }
  return sums[0].Word();
}

__device__ uint32_t AddWords(const OneShotArguments& arguments, const uint32_t* words) {
  switch (arguments.word) {
    case OneShotWord::kFloat32:
      return AddWordsAs<Float32Sum>(words, arguments.ranks, arguments.factor);
    case OneShotWord::kFloat16:
      return AddWordsAs<NarrowSum<Float16>>(words, arguments.ranks, arguments.factor);
    case OneShotWord::kBfloat16:
      return AddWordsAs<NarrowSum<Bfloat16>>(words, arguments.ranks, arguments.factor);
    default:
      return AddWordsAs<Int32Sum>(words, arguments.ranks, arguments.factor);
  }
}

}  // namespace
}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_WORD_SUMS_H_
