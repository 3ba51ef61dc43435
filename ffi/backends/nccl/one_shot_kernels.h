// The GPU code of small sums, and what it is called with.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_KERNELS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxcomm {

// A rank has an inbox in its memory, with a box for each rank of its group, in each of
// two halves: sums use them in turn. A box has lines of 64 bits, each a word of 32 bits
// and the flag of the sum that it belongs to, written and read at once. So a line that
// has the flag has the word, and nothing else is waited for.
//
// A rank is in the sum after the one that another is in, but no further: to end a sum
// it has a line of each. So nobody writes to a half that is still read.
struct OneShotArguments {
  static constexpr int kMostRanks = 8;
  static constexpr size_t kInboxBytes = size_t{2} << 20;

  uint64_t operand = 0, result = 0;  // addresses, of words
  uint64_t stop = 0;                 // of a word: not 0 ends the wait for other ranks
  uint64_t inboxes[kMostRanks] = {};
  uint32_t words = 0;
  uint32_t rank = 0, ranks = 0;
  uint32_t flag = 0;  // counts the group's sums from 1
  float factor =
      1;  // of float32: what operands are multiplied by before they are added
  uint32_t capacity = 0;  // words of a box

  static constexpr uint32_t Capacity(int ranks) {
    return static_cast<uint32_t>(kInboxBytes / 2 / sizeof(uint64_t)) /
           static_cast<uint32_t>(ranks);
  }
};

// What a word holds. 16-bit floats, of which it holds two, are added as float32 and
// rounded once.
enum class OneShotWord { kInt32, kFloat32, kFloat16, kBfloat16 };
inline constexpr int kNumOneShotWords = 4;

// The name of the kernel for it. Any number of threads does.
const char* OneShotKernelName(OneShotWord word);

// All of them, in NVIDIA's PTX, which the driver compiles for the GPU that it finds:
// compute capability 7.0 and newer.
std::string OneShotPtx();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_KERNELS_H_
