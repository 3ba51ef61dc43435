// The file in which a process tells what NCCL does. It outlives the process.
//
// One block for each communicator: its head, and a ring of its last operations. A
// reader may look at any time. Then it looks at the counts once more: operations that
// the ring has lost meanwhile may be torn. All numbers are little-endian;
// jaxcomm/diagnostics/ring.py reads them.
#ifndef JAXCOMM_FFI_WATCH_RING_H_
#define JAXCOMM_FFI_WATCH_RING_H_

#include <atomic>
#include <cstdint>

namespace jaxcomm {

inline constexpr uint64_t kRingMagic = 0x32304c434e58414a;  // "JAXNCL02"
inline constexpr int kRingBlocks = 64;
inline constexpr uint64_t kRingOperations = 256;  // of each block

// One collective, send or receive.
struct RingOperation {
  std::atomic<uint64_t> number;  // from 1; 0 while it is written
  int64_t enqueued_ns;           // since 1970
  std::atomic<int64_t> ended_ns;
  uint64_t count;
  // From above: whether it is a send or a receive (1 bit), its order among such, or
  // among collectives, from 1 (31 bits), channels of the GPU that have begun (16) and
  // ended (16). In one, so that no late event is taken for one of a new operation.
  std::atomic<uint64_t> state;
  uint16_t channels;
  uint16_t unused;
  int32_t peer;  // or root
  char collective[8];
  char dtype[8];
};
static_assert(sizeof(RingOperation) == 64);

struct alignas(64) RingBlock {
  std::atomic<uint64_t> id;  // of the communicator; 0: the block is free
  int32_t rank;
  int32_t ranks;
  std::atomic<uint32_t> is_closed;
  std::atomic<uint32_t> kernels;  // events of the GPU that came
  char name[40];
  alignas(64) std::atomic<uint64_t> count;  // operations so far
  std::atomic<uint32_t> orders[2];          // the last order of collectives, of others
  alignas(64) RingOperation operations[kRingOperations];
};

struct alignas(4096) Ring {
  std::atomic<uint64_t> magic;
  int32_t pid;
  int32_t process;
  int32_t processes;
  int32_t interface_version;
  int64_t began_ns;
  std::atomic<uint32_t> left_out;  // communicators for which there was no block
  uint32_t has_kernels;            // whether events of the GPU are asked for
  alignas(4096) RingBlock blocks[kRingBlocks];
};
static_assert(sizeof(RingBlock) == 128 + 64 * kRingOperations);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_WATCH_RING_H_
