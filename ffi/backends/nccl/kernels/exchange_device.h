// The code of the kernel of ExchangeArguments. Part of kernels.cu.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_EXCHANGE_DEVICE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_EXCHANGE_DEVICE_H_

#include "ffi/backends/nccl/kernels/kernels.h"
#include "ffi/backends/nccl/kernels/one_shot_device.h"

namespace jaxcomm {
namespace {

using Array = ExchangeArguments::Array;

// One chunk, as it is staged and taken.
struct Chunk {
  uint32_t array = 0, first = 0;  // its first word in a part of the array
  uint32_t number = 0;            // of the launch
};

__device__ uint32_t InRows(const ExchangeArguments::Rows& rows, uint32_t at) {
  return rows.words == rows.pitch ? at : at / rows.words * rows.pitch + at % rows.words;
}

__device__ uint32_t EndOf(const Array& array, const Chunk& chunk) {
  const uint32_t left = array.part - chunk.first;
  return chunk.first + (left < array.chunk ? left : array.chunk);
}

// The chunk behind one; its array is `count` behind the last.
__device__ Chunk Next(const ExchangeArguments& arguments, Chunk chunk) {
  ++chunk.number;
  if (chunk.array >= arguments.count) return chunk;
  chunk.first = EndOf(arguments.arrays[chunk.array], chunk);
  if (chunk.first < arguments.arrays[chunk.array].part) return chunk;
  ++chunk.array;
  chunk.first = 0;
  return chunk;
}

// What `from` stages for `to` of a chunk.
__device__ uint64_t BoxOf(const OneShotArguments& of, const Chunk& chunk, uint32_t from,
                          uint32_t to) {
  const uint32_t turn = chunk.number % 3;
  const uint64_t half = turn == 0 ? of.flag & 1 : turn + 1;
  return AddressOf(of.inboxes[to] + half * OneShotMemory::kHalfBytes,
                   from * of.capacity);
}

// A thread has the same words of a chunk when it stages and when it takes. Of those
// behind the last array there are none. `kMost`: ranks of the group, at most. With few
// of them a thread has fewer instructions for what it moves, which counts.
template <uint32_t kMost>
__device__ void StageChunk(const ExchangeArguments& arguments, const Chunk& chunk) {
  const OneShotArguments& of = arguments.of;
  if (chunk.array >= arguments.count) return;
  const Array& array = arguments.arrays[chunk.array];
  const uint32_t end = EndOf(array, chunk), own = of.rank;
  uint64_t boxes[kMost] = {};
  uint32_t parts[kMost] = {};
  for (uint32_t distance = 0; distance < kMost; ++distance) {
    if (distance >= of.ranks) continue;
    const uint32_t rank = RankAfter(of, distance);
    boxes[distance] = BoxOf(of, chunk, own, rank);
    parts[distance] = rank * array.from_stride;
  }
  JAXCOMM_ROLLED
  for (uint32_t at = chunk.first + FirstWord(); at < end; at += WordsOfGrid()) {
    const uint32_t from = InRows(array.from, at);
    Quad quads[kMost] = {};
    // All loads first: they are under way together.
    for (uint32_t distance = 0; distance < kMost; ++distance) {
      if (distance >= of.ranks) continue;
      quads[distance] = Load(array.operand, parts[distance] + from);
    }
    for (uint32_t distance = 1; distance < kMost; ++distance) {
      if (distance >= of.ranks) continue;
      Store(boxes[distance], at - chunk.first, quads[distance]);
    }
    Store(array.result, own * array.to_stride + InRows(array.to, at), quads[0]);
  }
}

template <uint32_t kMost>
__device__ void TakeChunk(const ExchangeArguments& arguments, const Chunk& chunk) {
  const OneShotArguments& of = arguments.of;
  if (chunk.array >= arguments.count) return;
  const Array& array = arguments.arrays[chunk.array];
  const uint32_t end = EndOf(array, chunk), own = of.rank;
  const uint64_t box = BoxOf(of, chunk, 0, own);
  JAXCOMM_ROLLED
  for (uint32_t at = chunk.first + FirstWord(); at < end; at += WordsOfGrid()) {
    Quad quads[kMost] = {};
    for (uint32_t distance = 1; distance < kMost; ++distance) {
      if (distance >= of.ranks) continue;
      quads[distance] =
          Load(box, RankAfter(of, distance) * of.capacity + at - chunk.first);
    }
    const uint32_t to = InRows(array.to, at);
    for (uint32_t distance = 1; distance < kMost; ++distance) {
      if (distance >= of.ranks) continue;
      Store(array.result, RankAfter(of, distance) * array.to_stride + to,
            quads[distance]);
    }
  }
}

template <uint32_t kMost>
__device__ void DoExchange(const ExchangeArguments& arguments) {
  const OneShotArguments& of = arguments.of;
  Chunk chunk;
  StageChunk<kMost>(arguments, chunk);
  if (!Meet(of, 0)) return;
  while (true) {
    const Chunk next = Next(arguments, chunk);
    const bool is_last = next.number == arguments.chunks;
    if (!is_last) {
      StageChunk<kMost>(arguments, next);
      Tell(of, 0, of.flag + next.number);
    }
    TakeChunk<kMost>(arguments, chunk);
    if (is_last || !Await(of, 0, of.flag + next.number)) return;
    chunk = next;
  }
}

#undef JAXCOMM_ROLLED

}  // namespace
}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_EXCHANGE_DEVICE_H_
