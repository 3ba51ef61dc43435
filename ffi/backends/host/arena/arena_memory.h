// The layout of the shared memory of a set of processes.
//
// Counters are written by one process each and lie on cache lines of their own.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_ARENA_ARENA_MEMORY_H_
#define JAXCOMM_FFI_BACKENDS_HOST_ARENA_ARENA_MEMORY_H_

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "ffi/backends/host/arena/doorbell.h"
#include "ffi/base/status.h"
#include "ffi/os/segment.h"

namespace jaxcomm {

inline constexpr int kMaxProcesses = 64;  // members are a 64-bit mask
inline constexpr int kCrossings = 256;    // at once, over all communicators
inline constexpr int kChannels = 16;      // large crossings at once
inline constexpr int kSlots = 8;          // of one process in one channel
inline constexpr int64_t kSlotBytes = 128 << 10;
inline constexpr int64_t kInlineBytes = 4096;  // of one process in one crossing
inline constexpr size_t kLine = 128;           // two cache lines are fetched together

constexpr bool IsChannel(int number) { return number >= 0 && number < kChannels; }

// Text that one process writes and others read for messages, whole or torn.
template <size_t kBytes>
class SharedText {
 public:
  void Store(std::string_view text) {
    const size_t length = std::min(text.size(), kBytes - 1);
    size_t word = 0;
    for (size_t i = 0; i <= length; i += 8, ++word) {
      uint64_t value = 0;
      // An empty text may lie nowhere, which memcpy() does not take.
      text.copy(reinterpret_cast<char*>(&value), std::min<size_t>(8, length - i), i);
      words_[word].store(value, std::memory_order_relaxed);
    }
  }
  std::string Load() const {
    std::string text;
    for (size_t i = 0; i < kBytes; ++i) {
      const uint64_t word = words_[i / 8].load(std::memory_order_relaxed);
      const char c = static_cast<char>(word >> (8 * (i % 8)));
      if (c == 0) break;
      text += c;
    }
    return text;
  }

 private:
  std::atomic<uint64_t> words_[kBytes / 8];
};

// What one process has done in a crossing. Each bit says one thing, and none is taken
// back while the crossing is open. So a process that has left still says whether its
// operand is there: it may have left because the crossing had failed.
struct alignas(kLine) Seat {
  enum Bit : uint32_t {
    kCame = 1,
    kHoldsOperand = 2,  // its small operands lie in the crossing, to be read
    kLeft = 4,
  };
  std::atomic<uint32_t> state;
  std::atomic<uint64_t> written;  // chunks staged in its slots
  // Mask of the members, absent when its process last looked, without which the process
  // cannot end its part. 0: not known, or none.
  std::atomic<uint64_t> lacks;

  bool Has(Bit bit) const { return (state.load(std::memory_order_acquire) & bit) != 0; }
  void Add(Bit bit) { state.fetch_or(bit, std::memory_order_release); }
  // Its process came and has not left.
  bool is_taken() const {
    return (state.load(std::memory_order_acquire) & (kCame | kLeft)) == kCame;
  }
};

struct alignas(kLine) Crossing {
  enum State : uint32_t { kFree, kOpen };
  std::atomic<uint32_t> state;
  std::atomic<uint64_t> communicator, group, run, tag;
  std::atomic<uint64_t> members;  // mask of processes
  std::atomic<uint64_t> signature;
  std::atomic<int32_t> channel;  // -1: none yet
  std::atomic<uint64_t> here;    // mask of the members that have come
  std::atomic<uint64_t> left;    // mask of the members that are done with it
  std::atomic<uint32_t> error;   // an ErrorCode, 0 while all is well
  std::atomic<uint64_t> opened;  // counts crossings: of one key the oldest goes first
  SharedText<256> call;          // of the first to come: "psum(float32[4])"
  SharedText<1024> failure;
};

// The last call of a process, for the messages of others.
struct alignas(kLine) ProcessState {
  enum Presence : uint32_t { kAttached, kLeft };
  std::atomic<uint32_t> presence;
  Doorbell doorbell;
  // While its thread sleeps: nothing in the process goes on before a crossing ends.
  std::atomic<bool> stands_still;
  SharedText<256> last;               // the last one entered
  std::atomic<uint64_t> last_number;  // how many-th of its group
};

// The first failure of a collective. From then on processes may be out of step: one
// may have had its result, and another not. A later call would meet a wrong one.
struct alignas(kLine) FirstFailure {
  std::atomic<uint32_t> process;  // JAX's index + 1; 0: nothing has failed
  SharedText<1024> text;
};

class ArenaMemory {
 public:
  // Bytes of a segment for so many processes.
  static int64_t Bytes(int processes);
  // Equal on processes that agree on where everything lies in a segment.
  static uint64_t LayoutHash();
  // The first process formats the segment; the others then attach to it.
  static void Format(const Segment& segment);

  ArenaMemory(std::shared_ptr<Segment> segment, int processes);

  int processes() const { return processes_; }
  const Segment& segment() const { return *segment_; }

  Seat& seat(const Crossing* crossing, int process) const;
  // Chunks of `writer` that `reader` has read or does not need.
  std::atomic<uint64_t>& passed(const Crossing* crossing, int reader, int writer) const;
  char* inline_data(const Crossing* crossing, int process) const;
  char* slot(int channel, int process, uint64_t chunk) const;
  ProcessState& process(int index) const { return header().processes[index]; }

  // What other processes wrote of a crossing, checked before it is used: one of them
  // may have written where it should not.
  uint64_t MembersOf(const Crossing* crossing) const;
  // -1: it has no channel yet.
  ErrorOr<int> ChannelOf(const Crossing* crossing) const;
  // Why it failed; OkStatus() while all is well.
  Status FailureOf(const Crossing* crossing) const;

  // Fails once the lock, or a collective, has failed. The arena is of no use then:
  // processes make another one when they have agreed anew.
  Status status() const {
    const bool is_well = lock_error_.load(std::memory_order_relaxed) == 0 &&
                         header().first.process.load(std::memory_order_acquire) == 0;
    return is_well ? OkStatus() : Failure();
  }

 protected:
  // A process that changes more than its own seat holds the lock, for a few hundred
  // nanoseconds. If it is killed meanwhile, the next process repairs what was half
  // done. False if the lock has failed.
  class Lock {
   public:
    explicit Lock(const ArenaMemory& memory);
    ~Lock() {
      if (is_held_) pthread_mutex_unlock(mutex_);
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

    explicit operator bool() const { return is_held_; }

   private:
    pthread_mutex_t* const mutex_;
    bool is_held_ = false;
  };

  struct Header {
    uint64_t nonce;  // the segment's
    pthread_mutex_t mutex;
    std::atomic<uint32_t> channels;  // mask of those in use
    std::atomic<uint64_t> opened;    // crossings so far
    // Mask of processes that found the table full, or no channel free. A process that
    // returns either must ring them. Requires the lock.
    std::atomic<uint64_t> starved;
    FirstFailure first;
    ProcessState processes[kMaxProcesses];
  };

  Header& header() const { return *reinterpret_cast<Header*>(segment_->data()); }
  Crossing* crossing(int index) const;

 private:
  Status Failure() const;
  // Frees the crossings and the channels that nobody uses. Requires the lock.
  void RepairLocked() const;

  const std::shared_ptr<Segment> segment_;
  const int processes_;
  const size_t crossing_bytes_;
  const size_t passed_row_;
  char* crossings_;
  char* inlines_;
  char* slots_;
  mutable std::atomic<int> lock_error_{0};
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_ARENA_ARENA_MEMORY_H_
