// The kernels of ragged_all_to_all: their names, and what they are launched with. Read
// by the host compiler and by NVRTC.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_RAGGED_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_RAGGED_H_

#include <cstddef>
#include <cstdint>

namespace jaxcomm {

// A ragged_all_to_all whose offsets and sizes no host reads. In the order of a stream:
//   1. kRaggedGive puts the rank's offsets and sizes where NCCL gathers those of all;
//   2. kRaggedCheck, on every rank, looks at those of all ranks. So all refuse the call
//      or none;
//   3. kRaggedMove, again and again, with a barrier of all ranks in between: puts what
//      other ranks get into their arenas, and takes what came from the own arena.
// No kernel waits for another rank. None writes to another's memory but its arena.
//
// An arena has two halves. Results are thought of as windows of as many bytes as a half
// has: what belongs into window w passes through half w % 2.
struct RaggedArguments {
  static constexpr int kMostRanks = 8;
  // The operands, in their order.
  enum Number { kInputOffsets, kSendSizes, kOutputOffsets, kRecvSizes, kNumbers };
  static constexpr uint64_t kNoWindow = ~uint64_t{0};
  // The word at `verdict`.
  static constexpr uint32_t kFits = 1, kDoesNotFit = 2;

  // Addresses.
  uint64_t operand = 0, result = 0;
  uint64_t given[kNumbers] = {};     // of this rank
  uint64_t own = 0;                  // where they are put, one after the other
  uint64_t gathered = 0;             // those of all ranks, by rank
  uint64_t verdict = 0;              // a 32-bit word of the device
  uint64_t refusal = 0;              // a RaggedRefusal
  uint64_t arenas[kMostRanks] = {};  // by rank

  uint64_t operand_rows = 0, output_rows = 0, row_bytes = 0;
  uint64_t window_bytes = 0;        // a multiple of 16
  uint64_t pushed = 0, pulled = 0;  // windows, or kNoWindow
  uint32_t rank = 0, ranks = 0;
  uint32_t slices = 0;       // of a rank
  uint32_t index_bytes = 0;  // of an offset or a size: 4 or 8
  uint32_t is_signed = 0;
  uint32_t number_bytes = 0;  // of an array of them, a multiple of 8
  uint32_t lanes = 0;         // so many parts of a slice are moved at the same time
  uint32_t operation = 0;     // in the OperationTable
};
static_assert(offsetof(RaggedArguments, arenas) == 80);
static_assert(offsetof(RaggedArguments, rank) == 192);
static_assert(sizeof(RaggedArguments) == 224);

// The first call that was refused, in the host's memory.
struct RaggedRefusal {
  static constexpr uint64_t kMostBytes = 16
                                         << 10;  // of the offsets and sizes of a rank

  uint32_t is_set = 0;  // last
  uint32_t operation = 0;
  uint64_t operand_rows = 0, output_rows = 0;
  uint32_t slices = 0, index_bytes = 0, is_signed = 0, number_bytes = 0;
  uint32_t numbers[RaggedArguments::kMostRanks * kMostBytes / sizeof(uint32_t)] = {};
};
static_assert(offsetof(RaggedRefusal, numbers) == 40);

// NVRTC would put them into the GPU's memory.
#ifndef __CUDACC__
inline constexpr const char* kRaggedGive = "jaxcomm_ragged_give";    // one block
inline constexpr const char* kRaggedCheck = "jaxcomm_ragged_check";  // one block
inline constexpr const char* kRaggedMove = "jaxcomm_ragged_move";    // any grid
#endif

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_RAGGED_H_
