// The operations of one rank that its device has yet to finish.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_IN_FLIGHT_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_IN_FLIGHT_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/backends/nccl/kernels/kernels.h"
#include "ffi/backends/nccl/library/library.h"
#include "ffi/backends/nccl/library/rank_facts.h"
#include "ffi/core/communicator.h"
#include "ffi/flight/flight_recorder.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

// Whether all sums up to one are done, and whether it has begun.
inline bool IsDone(const OneShotProgress& progress, uint32_t flag) {
  for (const uint32_t& ended : progress.ended) {
    if (__atomic_load_n(&ended, __ATOMIC_ACQUIRE) < flag) return false;
  }
  return true;
}
inline bool HasBegun(const OneShotProgress& progress, uint32_t flag) {
  return __atomic_load_n(&progress.began, __ATOMIC_ACQUIRE) >= flag;
}

class InFlight {
 public:
  using Clock = std::chrono::steady_clock;

  // Identifies an operation.
  struct Named {
    FlightRecorder::Ticket ticket = 0;
    uint32_t operation = 0;  // in the OperationTable
    uint64_t sequence = 0;   // counts the rank's operations
  };

  struct Overdue {
    bool found = false;
    uint32_t operation = 0;
    uint64_t sequence = 0;
    Status status = OkStatus();
  };

  InFlight(const NcclLibrary& library, FlightRecorder& recorder)
      : library_(library), recorder_(recorder) {}

  // Makes the events. The device's context is current, here and below.
  Status Prepare();
  void Release();

  // Call Begin() before and End() after enqueueing on `stream`, from one thread at a
  // time. They allocate nothing. They do not follow a stream that is being captured: it
  // runs nothing now. They may block in the driver when the launch queue of the stream
  // is full; Poll() never does.
  Status Begin(cuda::Stream stream, bool may_be_captured, Clock::time_point now);
  Status End(cuda::Stream stream, const Named& named, Clock::time_point now);

  // Of an operation of small sums, which tell how far they are.
  struct Told {
    const OneShotProgress* progress = nullptr;  // null: events say how far it is
    uint32_t first = 0, last = 0;               // flags of its sums
  };
  // In place of both, once `stream` has such an operation: it takes no event.
  Status Add(cuda::Stream stream, const Named& named, const Told& told);

  // Records what is done, and returns the first operation that failed or runs for
  // longer than `patience`. An operation that waits for its stream is not late.
  Overdue Poll(Clock::time_point now, std::chrono::duration<double> patience);
  // Returns the first operation that is not known to be done.
  Overdue First();
  // Records what is done.
  void Refresh();
  // Records that all others failed.
  void Fail();

  // Whether a stream was being captured when it was given an operation.
  bool was_captured() const { return was_captured_; }

  static constexpr int capacity() { return kEntries; }
  static constexpr int most_streams() { return kStreams; }
  int size() const { return size_.load(std::memory_order_relaxed); }

 private:
  // When there are more operations, each stream gets one entry more, which stands for
  // several. Operations of two streams never share one: the end of one would hide that
  // the other hangs.
  static constexpr int kEntries = 64;
  static constexpr int kStreams = 16;
  static constexpr int kSlots = kEntries + kStreams - 1;
  // An operation that is given this soon after another of its stream counts as begun
  // when that one is done: an event costs a launch, and what XLA can have put between
  // them in this time is a few kernels.
  static constexpr auto kRightBehind = std::chrono::microseconds(30);

  struct Entry {
    cuda::Event began = nullptr, ended = nullptr;
    Told told;
    cuda::Stream stream = nullptr;
    uint64_t tickets = 0;  // given until the last operation that it stands for
    uint32_t operation = 0;
    uint64_t sequence = 0;
    bool is_right_behind = false;  // the one before it, and `began` says nothing
    bool is_running = false;       // it was seen to have begun
    Clock::time_point since;       // when
  };

  void Finish(Entry& entry, FlightRecorder::State state) REQUIRES(mutex_);
  // Counts the first entries, in order, that are known to be done.
  int CountDone() const REQUIRES(mutex_);
  bool IsDone(int index) const REQUIRES(mutex_);
  void Retire() REQUIRES(mutex_);
  bool HasBegun(const Entry& entry) const;
  Entry& At(int index) REQUIRES(mutex_) { return entries_[(first_ + index) % kSlots]; }
  const Entry& At(int index) const REQUIRES(mutex_) {
    return entries_[(first_ + index) % kSlots];
  }
  // The entry that stands for an operation given to `stream` now: at `size()` if it is
  // its own. -1: there is none.
  int Find(cuda::Stream stream) const REQUIRES(mutex_);
  // Has the last entry stand for another operation, too. Those that end first wait for
  // it: tickets are finished in their order.
  void AddTicket(FlightRecorder::Ticket ticket) REQUIRES(mutex_);

  const NcclLibrary& library_;
  FlightRecorder& recorder_;
  Mutex mutex_;
  std::vector<Entry> entries_ GUARDED_BY(mutex_);  // a ring of kSlots
  int first_ GUARDED_BY(mutex_) = 0;
  // A ring of as many as the recorder keeps: it has forgotten what is not here.
  std::vector<FlightRecorder::Ticket> tickets_ GUARDED_BY(mutex_);
  uint64_t tickets_given_ GUARDED_BY(mutex_) = 0;
  uint64_t tickets_finished_ GUARDED_BY(mutex_) = 0;
  bool is_captured_ = false;
  bool is_begun_ = false;  // the operation being given has an entry with its beginning
  // Its end is being put off.
  const Entry* extended_ GUARDED_BY(mutex_) = nullptr;
  std::atomic<bool> was_captured_{false};
  cuda::Stream last_stream_ GUARDED_BY(mutex_) = nullptr;
  Clock::time_point last_given_;
  std::atomic<int> size_{0};
};

// "psum(float32[2]) over axes ('i',) (lane 'default', operation 3), rank 0 of 2
// (device 0): ".
std::string Describe(const InFlight::Overdue& operation, const CommunicatorSpec& spec,
                     const RankFacts& rank);

// "not done after 300 s. Other ranks may ...".
std::string DescribeLate(const CommunicatorSpec& spec);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_IN_FLIGHT_H_
