// The code of the kernels of ragged.h. Part of kernels.cu.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_RAGGED_DEVICE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_RAGGED_DEVICE_H_

#include "ffi/backends/nccl/kernels/ragged.h"

namespace jaxcomm {
namespace {

// The least that a block moves of a slice, if there is so much: 16 bytes a thread.
constexpr uint64_t kGrainBytes = 8192;

struct alignas(16) Wide {
  uint64_t low, high;
};

// A slice as a sender's numbers say it. Negative ones are huge.
struct RaggedSlice {
  uint64_t from, rows, to;
};

__device__ uint64_t NumberOf(const RaggedArguments& arguments, uint32_t rank,
                             RaggedArguments::Number number, uint32_t slice) {
  const uint64_t address =
      arguments.gathered +
      (uint64_t{rank} * RaggedArguments::kNumbers + number) * arguments.number_bytes +
      uint64_t{slice} * arguments.index_bytes;
  if (arguments.index_bytes == 8) return *reinterpret_cast<const uint64_t*>(address);
  const uint32_t value = *reinterpret_cast<const uint32_t*>(address);
  const bool is_negative = arguments.is_signed != 0 && value >> 31 != 0;
  return is_negative ? ~uint64_t{0} << 32 | value : value;
}

__device__ RaggedSlice SliceOf(const RaggedArguments& arguments, uint32_t source,
                               uint32_t slice) {
  return {NumberOf(arguments, source, RaggedArguments::kInputOffsets, slice),
          NumberOf(arguments, source, RaggedArguments::kSendSizes, slice),
          NumberOf(arguments, source, RaggedArguments::kOutputOffsets, slice)};
}

// The threads of one block copy bytes whose addresses differ by a multiple of the size
// of a Word.
template <typename Word>
__device__ void CopyWords(uint64_t to, uint64_t from, uint64_t bytes) {
  constexpr uint64_t kSize = sizeof(Word);
  constexpr uint32_t kAtOnce = 4;  // loads that are under way together
  const uint64_t before = (0 - to) % kSize;
  const uint64_t head = before < bytes ? before : bytes;
  const uint64_t words = (bytes - head) / kSize;
  const uint64_t tail = head + words * kSize;
  const auto* const in_bytes = reinterpret_cast<const uint8_t*>(from);
  auto* const out_bytes = reinterpret_cast<uint8_t*>(to);
  for (uint64_t i = threadIdx.x; i < head; i += blockDim.x) out_bytes[i] = in_bytes[i];
  const auto* const in = reinterpret_cast<const Word*>(from + head);
  auto* const out = reinterpret_cast<Word*>(to + head);
  for (uint64_t i = threadIdx.x; i < words; i += kAtOnce * blockDim.x) {
    Word held[kAtOnce] = {};
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      if (i + k * blockDim.x < words) held[k] = in[i + k * blockDim.x];
    }
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      if (i + k * blockDim.x < words) out[i + k * blockDim.x] = held[k];
    }
  }
  for (uint64_t i = tail + threadIdx.x; i < bytes; i += blockDim.x) {
    out_bytes[i] = in_bytes[i];
  }
}

__device__ void CopyBytes(uint64_t to, uint64_t from, uint64_t bytes) {
  const uint64_t apart = (to - from) % sizeof(Wide);
  if (apart == 0) {
    CopyWords<Wide>(to, from, bytes);
  } else if (apart % 4 == 0) {
    CopyWords<uint32_t>(to, from, bytes);
  } else if (apart % 2 == 0) {
    CopyWords<uint16_t>(to, from, bytes);
  } else {
    CopyWords<uint8_t>(to, from, bytes);
  }
}

// Puts the rank's offsets and sizes together.
__device__ void GiveNumbers(const RaggedArguments& arguments) {
  const uint64_t bytes = uint64_t{arguments.slices} * arguments.index_bytes;
  for (uint32_t i = 0; i < RaggedArguments::kNumbers; ++i) {
    CopyWords<uint32_t>(arguments.own + uint64_t{i} * arguments.number_bytes,
                        arguments.given[i], bytes);
  }
}

// Whether a slice lies within its sender's operand and its receiver's result, has as
// many rows as the receiver expects, and overlaps no other slice there: as
// ffi/planners/ragged_all_to_all.cc has it.
__device__ bool Fits(const RaggedArguments& arguments, uint32_t source,
                     uint32_t number) {
  const uint32_t each = arguments.slices / arguments.ranks;
  const uint32_t target = number / each;
  const RaggedSlice slice = SliceOf(arguments, source, number);
  const uint64_t expected = NumberOf(arguments, target, RaggedArguments::kRecvSizes,
                                     source * each + number % each);
  // No sums: they may overflow.
  if (slice.rows != expected || slice.rows > arguments.operand_rows ||
      slice.rows > arguments.output_rows ||
      slice.from > arguments.operand_rows - slice.rows ||
      slice.to > arguments.output_rows - slice.rows) {
    return false;
  }
  if (slice.rows == 0) return true;
  for (uint32_t other = 0; other < arguments.ranks; ++other) {
    for (uint32_t i = target * each; i < (target + 1) * each; ++i) {
      if (other == source && i == number) continue;
      const RaggedSlice next = SliceOf(arguments, other, i);
      // A sum that overflows is of one that does not fit itself.
      if (next.rows != 0 && slice.to < next.to + next.rows &&
          next.to < slice.to + slice.rows) {
        return false;
      }
    }
  }
  return true;
}

// Writes down the first call that is refused, by the threads of one block.
__device__ void Refuse(const RaggedArguments& arguments) {
  auto* const refusal = reinterpret_cast<RaggedRefusal*>(arguments.refusal);
  const bool is_set = threadIdx.x == 0 && LoadRelaxed(&refusal->is_set) != 0;
  if (__syncthreads_or(is_set)) return;
  const auto* const numbers = reinterpret_cast<const uint32_t*>(arguments.gathered);
  const uint32_t words = arguments.ranks * RaggedArguments::kNumbers *
                         (arguments.number_bytes / uint32_t{sizeof(uint32_t)});
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
    refusal->numbers[i] = numbers[i];
  }
  if (threadIdx.x == 0) {
    refusal->operation = arguments.operation;
    refusal->operand_rows = arguments.operand_rows;
    refusal->output_rows = arguments.output_rows;
    refusal->slices = arguments.slices;
    refusal->index_bytes = arguments.index_bytes;
    refusal->is_signed = arguments.is_signed;
    refusal->number_bytes = arguments.number_bytes;
  }
  FenceSystem();
  __syncthreads();
  if (threadIdx.x == 0) StoreRelaxed(&refusal->is_set, uint32_t{1});
}

__device__ void CheckNumbers(const RaggedArguments& arguments) {
  bool fit = true;
  for (uint32_t i = threadIdx.x; fit && i < arguments.ranks * arguments.slices;
       i += blockDim.x) {
    fit = Fits(arguments, i / arguments.slices, i % arguments.slices);
  }
  const bool is_refused = __syncthreads_or(!fit);
  if (is_refused) Refuse(arguments);
  if (threadIdx.x == 0) {
    *reinterpret_cast<uint32_t*>(arguments.verdict) =
        is_refused ? RaggedArguments::kDoesNotFit : RaggedArguments::kFits;
  }
}

// What a block moves: bytes of the slices from a rank to another. Byte x of the
// receiver's result is read at from + x and written at to + x, for first <= x < end.
// Sums of addresses may wrap around.
struct RaggedPiece {
  uint32_t source, target;
  uint64_t from, to, first, end;
  bool is_of_operand;  // `from` is of the operand's first byte instead
};

// One block moves its part of all slices of a piece. Parts of a slice go to as many
// blocks as there are lanes, and those of the next slice begin with the next block.
__device__ void MovePiece(const RaggedArguments& arguments, const RaggedPiece& piece,
                          uint32_t lane) {
  const uint32_t each = arguments.slices / arguments.ranks, lanes = arguments.lanes;
  for (uint32_t i = 0; i < each; ++i) {
    const RaggedSlice slice = SliceOf(arguments, piece.source, piece.target * each + i);
    const uint64_t to = slice.to * arguments.row_bytes;
    const uint64_t to_end = to + slice.rows * arguments.row_bytes;
    const uint64_t first = to < piece.first ? piece.first : to;
    const uint64_t end = to_end < piece.end ? to_end : piece.end;
    if (first >= end) continue;
    const uint64_t grains = (end - first + kGrainBytes - 1) / kGrainBytes;
    const uint64_t part = (grains + lanes - 1) / lanes * kGrainBytes;
    const uint64_t at = first + (lane + i) % lanes * part;
    if (at >= end) continue;
    const uint64_t from = piece.is_of_operand
                              ? piece.from + slice.from * arguments.row_bytes - to
                              : piece.from;
    CopyBytes(piece.to + at, from + at, end - at < part ? end - at : part);
  }
}

// The pieces of a launch: what each other rank gets of the pushed window, what came
// from each in the pulled one, and with the first window what the rank sends itself.
__device__ uint32_t NumPieces(const RaggedArguments& arguments) {
  const uint32_t others = arguments.ranks - 1;
  return (arguments.pushed != RaggedArguments::kNoWindow ? others : 0) +
         (arguments.pulled != RaggedArguments::kNoWindow ? others : 0) +
         (arguments.pushed == 0 ? 1 : 0);
}

__device__ RaggedPiece PieceOf(const RaggedArguments& arguments, uint32_t number) {
  const uint32_t others = arguments.ranks - 1, rank = arguments.rank;
  const bool pushes = arguments.pushed != RaggedArguments::kNoWindow;
  const bool pulls = arguments.pulled != RaggedArguments::kNoWindow;
  RaggedPiece piece = {rank,         rank, arguments.operand, arguments.result, 0,
                       ~uint64_t{0}, true};
  const bool is_push = pushes && number < others;
  if (!is_push && pushes) number -= others;
  if (!is_push && (!pulls || number >= others)) return piece;
  // Each rank begins with another.
  const uint32_t other = (rank + 1 + number) % arguments.ranks;
  const uint64_t window = is_push ? arguments.pushed : arguments.pulled;
  piece.first = window * arguments.window_bytes;
  piece.end = piece.first + arguments.window_bytes;
  // Byte x is at half + x.
  const uint64_t half = arguments.arenas[is_push ? other : rank] +
                        window % 2 * arguments.window_bytes - piece.first;
  if (is_push) {
    piece.target = other;
    piece.to = half;
  } else {
    piece.source = other;
    piece.from = half;
    piece.is_of_operand = false;
  }
  return piece;
}

__device__ void MoveWindows(const RaggedArguments& arguments) {
  const uint32_t pieces = NumPieces(arguments);
  for (uint32_t unit = blockIdx.x; unit < pieces * arguments.lanes; unit += gridDim.x) {
    MovePiece(arguments, PieceOf(arguments, unit % pieces), unit / pieces);
  }
  FenceSystem();
}

}  // namespace
}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_RAGGED_DEVICE_H_
