// The kernels of kernels.cu: their names, and what they are launched with. Read by the
// host compiler and by NVRTC.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_KERNELS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_KERNELS_H_

#include <cstddef>
#include <cstdint>

namespace jaxcomm {

// How far the work of one rank is: flags, in host memory, which the host reads. Work is
// done once all of `ended` have its flag or a later one.
struct OneShotProgress {
  // As many as there are blocks at most: a block's threads write a share of them.
  static constexpr uint32_t kEnds = 64;

  uint32_t began = 0;
  uint32_t ended[kEnds] = {};
};

// What a word holds. A word holds two 16-bit floats. They are added as float32 and
// rounded once. kMoved: anything, which is not added.
enum class OneShotWord : uint32_t { kInt32, kFloat32, kFloat16, kBfloat16, kMoved };

// Sums, gathers, exchanges and hops of a group whose ranks reach each other's memory.
// A rank sends parts of its operand: a part to each other rank, or one part to all. It
// adds what it gets with the same part of its own, or puts it into its result.
//
// Each rank has a box for each rank of the group in its memory, in two halves, which
// work uses in turn. To end its work, a rank needs something of every other rank. So no
// rank is more than one work ahead of another, and nobody writes to a half that is
// still read. There are two ways:
//
//   lines    (kLinesKernel): a line has 64 bits, a word of 32 bits, and the flag of
//            the work that the word belongs to. It is written and read at once, so a
//            line that has the flag has the word. Ranks wait for nothing else. Any
//            number of blocks and threads is right;
//   staged   (kStagedKernel): words alone, and a line for each block behind them. So
//            half as many bytes travel, but each step takes a fence. Requires as many
//            blocks and threads on all ranks, and that addresses are multiples of 16,
//            and numbers of words of 4. A sum is made in two steps: each rank
//            adds one part, and sends the sum to all. Gathers and exchanges of any
//            size have a kernel of their own: see ExchangeArguments.
//
// All threads must be able to run at the same time, on every rank.
struct OneShotArguments {
  static constexpr int kMostRanks = 8;
  static constexpr int kMostThreads = 256;  // of a block
  static constexpr uint32_t kAll = ~uint32_t{0};

  uint64_t operand = 0, result = 0;  // addresses of words; they may be equal
  uint64_t stop = 0;  // address of a 32-bit word; not 0: do not wait for other ranks
  uint64_t inboxes[kMostRanks] =
      {};                 // addresses, by rank: of lines, or of what is staged
  uint64_t progress = 0;  // address of the rank's OneShotProgress
  uint32_t part = 0;      // words that a rank gets of another, at most
  uint32_t rank = 0, ranks = 0;
  uint32_t flag = 0;      // counts the group's works from 1
  float factor = 1;       // float32 only: multiplies operands before they are added
  uint32_t capacity = 0;  // words of a box
  // Words from the part of a rank to that of the next, in the operand and, where
  // nothing is added, in the result. 0: all get the same part.
  uint32_t from_stride = 0, to_stride = 0;
  uint32_t words = 0;      // of the operand; the last parts may be shorter
  uint32_t is_shared = 0;  // staged sums only: all ranks get the whole sum
  // Of a hop: who gets the one part, and whose this rank gets. Others get a word.
  uint32_t target = kAll, source = kAll;
  OneShotWord word = OneShotWord::kMoved;
  uint32_t reserved = 0;
};
static_assert(offsetof(OneShotArguments, inboxes) == 24);
static_assert(offsetof(OneShotArguments, part) == 96);
static_assert(sizeof(OneShotArguments) == 152);

// Where boxes lie in the memory of a rank, which has kBytes.
struct OneShotMemory {
  // What is staged: for each of two steps two halves of boxes. Behind it, flags by
  // step, rank and block. A hop has a half for itself.
  static constexpr uint64_t kHalfBytes = uint64_t{4} << 20;
  static constexpr uint64_t kStagedBytes = 4 * kHalfBytes;
  static constexpr uint64_t kFlagBytes =
      2 * OneShotArguments::kMostRanks * OneShotProgress::kEnds * sizeof(uint64_t);
  // Lines, in two halves.
  static constexpr uint64_t kLinesAt = kStagedBytes + kFlagBytes;
  static constexpr uint64_t kLineBytes = uint64_t{3} << 20;
  static constexpr uint64_t kBytes = kLinesAt + kLineBytes;
  // Flags count from 1.
  static constexpr uint64_t kZeroedBytes = kFlagBytes + kLineBytes;

#ifndef __CUDACC__  // NVRTC takes no host functions
  // Words of a box: of lines, and of what is staged.
  static constexpr uint32_t Lines(int ranks) {
    return static_cast<uint32_t>(kLineBytes / 2 / sizeof(uint64_t)) /
           static_cast<uint32_t>(ranks);
  }
  static constexpr uint32_t Staged(int ranks) {
    return static_cast<uint32_t>(kHalfBytes / 16) / static_cast<uint32_t>(ranks) * 4;
  }
#endif
};

// Gathers and exchanges that are staged (kExchangeKernel), of any size: each array in
// chunks that a box can take.
//
// A chunk has a flag of its own, so one launch has several, and an odd number of them:
// the next work then uses the other half. The first chunk is staged in the half of its
// flag, those behind it in the two halves of the second step and in that one, by turns.
// A rank that has got a chunk of another knows that this one has taken the last but
// one, so it stages the next, and then takes the one that it got.
struct ExchangeArguments {
  static constexpr int kMostArrays = 4;
  static constexpr int kMostThreads = 512;  // of a block
  static constexpr int kMostBlocks = 32;

  // Word i of a part lies in row i / words. `pitch`: words from a row to the next.
  struct Rows {
    uint32_t words = 1, pitch = 1;
  };
  struct Array {
    uint64_t operand = 0, result = 0;
    // As of OneShotArguments. All parts are alike.
    uint32_t part = 0, from_stride = 0, to_stride = 0;
    Rows from, to;       // of whole quads, if there are gaps between them
    uint32_t chunk = 0;  // words of a chunk: whole quads
  };

  OneShotArguments of;  // but for what an array has itself
  Array arrays[kMostArrays];
  uint32_t count = 0;   // of arrays; each has a chunk at least
  uint32_t chunks = 0;  // of all arrays, or one more
};
static_assert(offsetof(ExchangeArguments, arrays) == sizeof(OneShotArguments));

// kPoisonKernel overwrites results with bytes of 0xff if a word of host memory is not
// 0: NaN for floats, -1 for integers. Launched with one block, behind an operation that
// may have been aborted.
struct PoisonArguments {
  static constexpr int kMostPoisoned = 32;

  struct Result {
    uint64_t address = 0, bytes = 0;  // of any alignment and length
  };

  uint64_t word = 0;  // address of a 32-bit word; 0 there: leave the results alone
  uint32_t count = 0;
  uint32_t reserved = 0;
  Result results[kMostPoisoned] = {};
};
static_assert(offsetof(PoisonArguments, results) == 16);
// CUDA 12.0 takes 4 KiB of arguments.
static_assert(sizeof(PoisonArguments) == 528);

// Names. NVRTC would put them into the GPU's memory.
#ifndef __CUDACC__
inline constexpr const char* kLinesKernel = "jaxcomm_lines";
inline constexpr const char* kStagedKernel = "jaxcomm_staged";
inline constexpr const char* kExchangeKernel = "jaxcomm_exchange";

// Makes the device fault, and with it the CUDA context. Its only argument is a
// uint64_t: the address of 8 bytes of device memory, aligned to 4 bytes. One thread is
// enough.
//
// The thread reads a misaligned word. Of the ways to fault this is the one that CUDA
// reports soonest (H200: 50 ms after the launch; an unmapped address 100 to 180 ms,
// `trap` 345 ms).
inline constexpr const char* kStopKernel = "jaxcomm_stop";

inline constexpr const char* kPoisonKernel = "jaxcomm_poison";
#endif

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_KERNELS_H_
