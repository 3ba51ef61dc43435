// The shared memory of a set of processes, the one place where they meet. All
// communicators of the set share it.
//
// A collective that spans processes takes one *crossing*: a slot of a table, found
// by key. Each process has a seat in it, with a few KiB for small operands. A large
// operand is streamed through a *channel*: every process owns a ring of slots in it,
// which it alone writes and the others read. The slots stay in the cache.
//
// Counters are written by one process each and lie on cache lines of their own.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_ARENA_H_
#define JAXCOMM_FFI_BACKENDS_HOST_ARENA_H_

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/backends/host/segment.h"
#include "ffi/backends/host/store_tuner.h"
#include "ffi/status.h"

namespace jaxcomm {

inline constexpr int kMaxProcesses = 64;  // members are a 64-bit mask
inline constexpr int kCrossings = 256;    // at once, over all communicators
inline constexpr int kChannels = 16;      // large crossings at once
inline constexpr int kSlots = 8;          // of one process in one channel
inline constexpr int64_t kSlotBytes = 128 << 10;
inline constexpr int64_t kInlineBytes = 4096;  // of one process in one crossing
inline constexpr size_t kLine = 128;           // two cache lines are fetched together

// Text that one process writes and others read for messages, whole or torn.
template <size_t kBytes>
class SharedText {
 public:
  void Store(std::string_view text) {
    const size_t length = std::min(text.size(), kBytes - 1);
    size_t word = 0;
    for (size_t i = 0; i <= length; i += 8, ++word) {
      uint64_t value = 0;
      std::memcpy(&value, text.data() + i, std::min<size_t>(8, length - i));
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

struct CrossingKey {
  uint64_t communicator = 0;  // with its generation
  uint64_t group = 0;
  uint64_t run = 0;  // number of the run
  uint64_t tag = 0;

  uint64_t Hash() const;
};

struct alignas(kLine) Seat {
  enum State : uint32_t { kAbsent, kHere, kReady, kLeft };
  std::atomic<uint32_t> state;    // ready: its small operands lie in the crossing
  std::atomic<uint64_t> written;  // chunks staged in its slots
  // Of these, by chunk modulo 64, whether it was written past the caches.
  std::atomic<uint64_t> past_caches;
};

struct alignas(kLine) Crossing {
  enum State : uint32_t { kFree, kOpen };
  std::atomic<uint32_t> state;
  std::atomic<uint64_t> communicator, group, run, tag;
  std::atomic<uint64_t> members;  // mask of processes
  std::atomic<uint64_t> signature;
  std::atomic<int32_t> channel;  // -1: none yet
  std::atomic<uint32_t> here;    // members that have come
  std::atomic<uint32_t> left;    // of them, those that are done with it
  std::atomic<uint32_t> error;   // an ErrorCode, 0 while all is well
  std::atomic<uint64_t> opened;  // counts crossings: the oldest failed goes first
  SharedText<256> call;          // of the first to come: "psum(float32[4])"
  SharedText<1024> failure;
};

// What a process last did, for the messages of others.
struct alignas(kLine) ProcessState {
  enum Presence : uint32_t { kAttached, kLeft };
  std::atomic<uint32_t> presence;
  std::atomic<uint32_t> doorbell;  // a futex, rung when something happened
  std::atomic<uint32_t> asleep;    // on the doorbell: 1, waiting for others; 2, idle
  std::atomic<uint64_t> started;   // crossings entered
  std::atomic<uint64_t> finished;  // and left
  SharedText<256> last;            // the last one entered
  // A communicator, and a group of it, of which it has yet to hear that others failed
  // in what it had finished; and how. 0: nothing.
  std::atomic<uint64_t> unheard_of, unheard_of_group;
  SharedText<1024> unheard;
};

class Arena {
 public:
  // Bytes of a segment for so many processes.
  static int64_t Bytes(int processes);
  // The first process formats the segment; the others then attach to it.
  static void Format(const Segment& segment, int processes);

  // A view of the segment for one of its processes, of which messages speak by `names`.
  Arena(std::shared_ptr<Segment> segment, std::vector<int> names, int self);
  ~Arena();

  int processes() const { return processes_; }
  int self() const { return self_; }
  const Segment& segment() const { return *segment_; }

  // Takes this process's seat in the crossing of that key at which it has not been,
  // opening it if there is none. Null if the table is full of others: try again later.
  // It may have failed, and does if the signatures differ; then leave it.
  // `wants_channel`: its operands are to be streamed.
  Crossing* Join(const CrossingKey& key, uint64_t members, uint64_t signature,
                 std::string_view call, bool wants_channel);
  // Gives an open crossing a channel, when all its members are here or channels
  // abound; then it surely ends, and gives the channel back.
  void TryAssignChannel(Crossing* crossing);
  // Gives this process's seat back; the crossing is free once all have.
  void Leave(Crossing* crossing);
  // To be called with a crossing whose failure this process has seen.
  void Heard(const Crossing* crossing);
  // Fails the crossing for all its members. The first failure stands.
  void Fail(Crossing* crossing, const Status& error);
  // Gives back the seats of a process that is no more.
  void Abandon(Crossing* crossing, int process);

  Seat& seat(const Crossing* crossing, int process) const;
  // Chunks of `writer` that `reader` has read or needs not.
  std::atomic<uint64_t>& passed(const Crossing* crossing, int reader, int writer) const;
  char* inline_data(const Crossing* crossing, int process) const;
  char* slot(int channel, int process, uint64_t chunk) const;
  ProcessState& process(int index) const;

  // How this process writes its chunks.
  StoreTuner& tuner() { return tuner_; }

  // Open crossings in which `process` is seated, "psum(float32[4])" each.
  std::vector<std::string> CallsOf(int process) const;

  // Wakes the processes of the mask that sleep while they wait for others.
  void Ring(uint64_t mask) const;
  // Sleeps until the doorbell has moved on from `seen`, at most so long.
  void Sleep(uint32_t seen, double seconds) const;
  void RingSelf() const;

 private:
  struct Header;
  class Lock;

  Header& header() const;
  Crossing* crossing(int index) const;
  void AssignChannelLocked(Crossing* crossing);
  void ReturnChannelLocked(Crossing* crossing);
  void FailLocked(Crossing* crossing, ErrorCode code, std::string_view text);
  // Has the members that were done with it fail in what their group is in, or begins
  // next.
  void TellThoseWhoLeftLocked(const Crossing* crossing, const std::string& text);
  void LeaveSeat(Crossing* crossing, int process);
  void CleanUp(Crossing* crossing);

  const std::shared_ptr<Segment> segment_;
  const std::vector<int> names_;
  const int processes_;
  const int self_;
  const size_t crossing_bytes_;
  const size_t passed_row_;
  char* crossings_;
  char* inlines_;
  char* slots_;
  StoreTuner tuner_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_ARENA_H_
