// The choice of an engine for a call: one pure function and all its thresholds.
//
// Every rank of a group must choose alike. So the facts of a call, the policy and the
// topology are the same on all ranks of the group.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PLANS_ENGINE_CHOICE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PLANS_ENGINE_CHOICE_H_

#include <cstdint>

#include "ffi/backends/nccl/kernels/kernels.h"

namespace jaxcomm {

enum class EngineKind {
  kNccl,     // NCCL's kernels; every call can go this way
  kCopy,     // the GPUs' copy engines, within a process
  kMapped,   // the same, between processes
  kOneShot,  // a kernel of ours for small arrays
};

// The least that some rank sends for copy engines to be faster. On two H200s NCCL is up
// to a sixth faster with 16 MiB; copies are a quarter faster with 32 MiB and with 256.
inline constexpr int64_t kLeastCopiedBytes = 32 << 20;
// The same of the start of a split-phase call: a kernel of NCCL waits until the work
// beside it leaves it room on the GPU. On two H100s a ring of 8,192 tokens, which sends
// 16 MiB, took 0.87 of the time by copies, and a halo of 6 MiB 0.95.
// So it is of rows, which NCCL sends once they are packed.
inline constexpr int64_t kLeastBytesOfMore = 4 << 20;
// Between processes, a rank's operand is copied twice, and what moves along pairs alone
// gains. On four H100s, one process each, NCCL's time over that of copies is 0.9 at
// 1 MiB, 1.1 at 4, 1.3 at 16, 1.2 at 64 and 0.6 at 256. Beside other work copies win at
// any size, since they leave it the multiprocessors.
inline constexpr int64_t kLeastMappedBytes = 4 << 20;
inline constexpr int64_t kMostMappedBytes = 64 << 20;
// GPUs that read the sizes of ragged_all_to_all store to windows of memory, with a
// barrier behind each. On four H200s, GB/s of a rank in a chain by hosts and by GPUs: 5
// and 12 at 1 MiB, 52 and 163 at 16, 187 and 95 at 128. On two: 6 and 12, 68 and 210,
// 235 and 227. So GPUs do operands that one window holds. Their results have few
// windows, which may all be empty: a call of 16 MiB took hosts 236 us more, some 25 for
// each of so many.
inline constexpr int64_t kMostWindowsOfResult = 8;
inline constexpr bool SizesAreForGpus(int64_t operand_bytes, int64_t result_bytes,
                                      int64_t window_bytes) {
  return operand_bytes <= window_bytes &&
         result_bytes <= kMostWindowsOfResult * window_bytes;
}
// The least bytes of a copy, on average: a kernel moves many small rows faster.
inline constexpr int64_t kLeastBytesOfCopy = 1 << 20;
// The same of the start of a gather between processes. If a kernel of FlashAttention
// begins before NCCL's, that one begins when it has ended. Layers with documents, of
// four H200s, took 413 us by copies and 448 by NCCL where a rank sent 12 MiB in pieces
// of 2; 207 and 182 where it sent 3 in pieces of 0.5. What arrives counts, too: of four
// ranks these are 0.9 and 0.2 MiB a copy.
inline constexpr int64_t kLeastBytesOfGathered = 512 << 10;
// Of rows that are smaller each counts as a copy.
inline constexpr int64_t kLeastBytesOfRow = 512;
// The most arrays of one call that are done by kernels of ours: NCCL does more of them
// as one group.
inline constexpr int kMostWorks = 4;
// The most bytes that a rank sends by lines, without their flags. More is staged, which
// takes a fence for each step, and a sum has two steps. On four H100s, kernels alone
// took, in us, by lines and staged: hops of 64 KiB 5 and 6, of 256 KiB 7 and 7; sums of
// 64 KiB 6 and 10, of 256 KiB 11 and 11, of 512 KiB 18 and 12 (20 launches in a CUDA
// graph).
inline constexpr int64_t kMostLineBytes = 128 << 10;
inline constexpr int64_t kMostLineBytesOfSum = 384 << 10;
// Lines have room for these sums, and for more on more ranks, but not for such hops.
static_assert(kMostLineBytesOfSum / 4 <= OneShotMemory::Lines(2));
// The most bytes of an operand, or of what is gathered, that are staged. In chains of
// four H100s, NCCL's time over ours was 1.2 for sums of 4 MiB, 1.8 for hops of 2 MiB.
inline constexpr int64_t kMostStagedBytes = OneShotMemory::kHalfBytes;
// The most that a rank sends to another of a gather or an exchange by a kernel of ours:
// see ExchangeArguments. On four H100s, one process each, NCCL's time over ours was 1.5
// for gathers of 2 MiB, 1.0 of 8 and 0.9 of 32; 1.4 for exchanges of 4 MiB, 1.1 of 8
// and 0.9 of 16; on two, 1.3 of 8 and 0.8 of 16. Rows to more than two ranks, which
// NCCL has packed, gain at any size: 1.7 for those of attention's heads with 8,192
// tokens, 1.3 with 32,768.
inline constexpr int64_t kMostExchangedBytes = int64_t{8} << 20;
// Numbers of words have 32 bits.
inline constexpr int64_t kMostExchangedWords = int64_t{1} << 31;
// More flags than one call uses.
inline constexpr uint32_t kFlagsOfCall = 1 << 20;

struct CallFacts {
  int size = 1;  // ranks of the group
  // A collective that copies can serve. `bytes_sent` and `copies` are of the rank that
  // has the most; without `copies`, `bytes_sent` is an upper bound.
  bool copies_serve = false;
  bool moves_along_pairs = false;  // a permutation
  bool is_packed_for_nccl = false;
  bool gathers_in_slots = false;  // of MappedCopies, which take all of a rank at once
  int64_t bytes_sent = 0;
  int64_t copies = 0;
  // How many arrays our kernels are to do, if they can do them all: see OneShotWork.
  int works = 0;
  bool is_staged = false;  // some of that is staged
  // What a rank sends by ExchangeArguments, and whether rows of it are apart.
  int64_t bytes_exchanged = 0;
  bool exchanges_rows = false;
  // These differ from call to call.
  bool is_symmetric = false;     // all operands and results lie in symmetric memory
  bool may_be_captured = false;  // in a CUDA graph
  bool is_start = false;         // of a split-phase call
};

// The engines that the user's CommPolicy allows.
struct EnginePolicy {
  bool copy_engines = false;
  bool one_shot = false;
  // How long a rank waits for another before NCCL is to do what they were to copy. XLA
  // waits ten seconds for the launches of all devices once one of them has failed.
  double copy_patience_seconds = 2;
  // Whether GPUs read the sizes of ragged_all_to_all themselves: see DeviceSized. Its
  // windows have a multiple of 16 bytes.
  bool device_sizes = false;
  uint64_t window_bytes = uint64_t{32} << 20;
  // The most bytes of a GPU's memory that others map: see DeviceArena.
  uint64_t arena_bytes = uint64_t{512} << 20;
  // The least that one of more than two ranks of a process sends to the others by
  // copies: they wait for each other on the host. On four H100s NCCL's time over that
  // of copies was 0.78 for an all_to_all of 128 MiB in a row, of which a rank sends 96;
  // 1.12 for one of 256 MiB.
  int64_t least_copied_to_many = 128 << 20;
};

struct EngineTopology {
  // All ranks are of this process, and their devices reach each other's memory.
  bool can_copy = false;
  // All ranks of the group, of several processes, have each other's memory mapped.
  bool can_map = false;
  // All ranks of the group agreed that their kernels can: see OneShot.
  bool has_kernels = false;
  // All work has flags of its own. So many are left.
  uint32_t works_left = 0;
};

EngineKind Choose(const CallFacts& call, const EnginePolicy& policy,
                  const EngineTopology& topology);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PLANS_ENGINE_CHOICE_H_
