// The kernels of kernels.cu: their names, and what they are launched with. Read by the
// host compiler and by NVRTC.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_KERNELS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_KERNELS_H_

#include <cstddef>
#include <cstdint>

namespace jaxcomm {

// How far the sums of one rank are: flags of sums, in host memory, which the host
// reads. A sum is done once all of `ended` have its flag or a later one.
struct OneShotProgress {
  // As many as there are blocks at most: a block's threads write a share of them.
  static constexpr uint32_t kEnds = 64;

  uint32_t began = 0;
  uint32_t ended[kEnds] = {};
};

// A small sum (jaxcomm_sum_*). Any number of blocks and threads adds correctly, if all
// of them can run at the same time, on every rank.
//
// Each rank has an inbox in its memory. An inbox has two halves, which sums use in
// turn. A half has a box for each rank of the group. A box has lines of 64 bits: a word
// of 32 bits, and the flag of the sum that the word belongs to. A line is written and
// read at once, so a line that has the flag has the word: the kernel waits for nothing
// else.
//
// To end a sum, a rank needs lines of every other rank. So no rank is more than one sum
// ahead of another, and nobody writes to a half that is still read.
struct OneShotArguments {
  static constexpr int kMostRanks = 8;

  uint64_t operand = 0, result = 0;  // addresses of words; they may be equal
  uint64_t stop = 0;  // address of a 32-bit word; not 0: do not wait for other ranks
  uint64_t inboxes[kMostRanks] = {};  // addresses, by rank
  uint64_t progress = 0;              // address of the rank's OneShotProgress
  uint32_t words = 0;
  uint32_t rank = 0, ranks = 0;
  uint32_t flag = 0;      // counts the group's sums from 1
  float factor = 1;       // float32 only: multiplies operands before they are added
  uint32_t capacity = 0;  // words of a box

#ifndef __CUDACC__  // NVRTC takes no host functions
  // Two ranks add up to 1 MiB each: on two H200s a chain of sums of 512 KiB or 1 MiB
  // takes 0.6 to 0.8 of NCCL's time, and one of 4 MiB takes longer. Larger groups were
  // measured with up to 512 KiB for all ranks together.
  static constexpr size_t InboxBytes(int ranks) {
    return size_t{ranks == 2 ? 8u : 2u} << 20;
  }
  static constexpr uint32_t Capacity(int ranks) {
    return static_cast<uint32_t>(InboxBytes(ranks) / 2 / sizeof(uint64_t)) /
           static_cast<uint32_t>(ranks);
  }
#endif
};
static_assert(offsetof(OneShotArguments, inboxes) == 24);
static_assert(offsetof(OneShotArguments, words) == 96);
static_assert(sizeof(OneShotArguments) == 120);

// What a word holds. A word holds two 16-bit floats. They are added as float32 and
// rounded once.
enum class OneShotWord { kInt32, kFloat32, kFloat16, kBfloat16 };
inline constexpr int kNumOneShotWords = 4;

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
// By OneShotWord.
inline constexpr const char* kSumKernels[kNumOneShotWords] = {
    "jaxcomm_sum_int32", "jaxcomm_sum_float32", "jaxcomm_sum_float16",
    "jaxcomm_sum_bfloat16"};

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
