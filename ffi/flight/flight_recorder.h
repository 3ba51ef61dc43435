// The last operations of a communicator. They show why a program hangs.
//
// Every rank has its own ring: a rank that goes on, in another group say, never
// overwrites the last operations of a rank that hangs. A slot is a seqlock: `version`
// is odd while the slot is written. See Boehm, "Can seqlocks get along with programming
// language memory models?", MSPC 2012.
#ifndef JAXCOMM_FFI_FLIGHT_FLIGHT_RECORDER_H_
#define JAXCOMM_FFI_FLIGHT_FLIGHT_RECORDER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "ffi/flight/operation_table.h"
#include "ffi/flight/ticks.h"

namespace jaxcomm {

class FlightRecorder {
 public:
  // Entries of all ranks of the communicator together, but at least kLeastEntries each.
  static constexpr int kEntries = 1024;
  static constexpr int kLeastEntries = 64;

  // kStarted: a rank is missing, or bytes are moving.
  enum class State : uint8_t { kStarted, kCompleted, kFailed };

  // Identifies an entry while it is in the ring.
  using Ticket = uint64_t;

  struct Entry {
    uint64_t sequence = 0;  // 1: the first operation of this rank
    int64_t run_id = 0;
    uint64_t tag = 0;
    const Operation* operation = nullptr;  // never destroyed
    int group = 0;
    int rank = 0;
    int64_t device = 0;  // global id
    State state = State::kStarted;
    double started = 0;  // unix seconds
    double seconds = 0;  // until it ended; 0 while it has not
  };

  // `groups` as in CommunicatorSpec.
  explicit FlightRecorder(const std::vector<std::vector<int64_t>>& groups);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // Records that a rank takes part in an operation of the OperationTable. Lock-free,
  // and without allocation after a rank's first operation.
  Ticket Start(uint32_t operation, int64_t run_id, uint64_t tag, int group, int rank);

  // Replaces XLA's id of the run by a number that is the same on all processes. XLA's
  // id differs between processes if the program's source lies elsewhere, or was
  // compiled before. Does nothing if the ring has overwritten the entry.
  void SetRun(Ticket ticket, int64_t run_id);

  // Records how the operation ended. Does nothing if it has already ended, or if the
  // ring has overwritten the entry.
  void Finish(Ticket ticket, State state);

  // Returns the entries, oldest first, without those that are being written.
  std::vector<Entry> Snapshot() const;

  int entries_per_rank() const { return static_cast<int>(mask_) + 1; }
  int64_t host_bytes() const;

 private:
  // Readers run concurrently, so all fields are atomic. On x86 they cost no more than
  // plain fields.
  struct Slot {
    std::atomic<uint64_t> version{0};  // 2 * sequence, less 1 while being written
    std::atomic<int64_t> run_id{0};
    std::atomic<uint64_t> tag{0};
    std::atomic<uint64_t> started{0};  // ticks
    // The state is in the lowest bits. Above it is the sequence, unique to this entry,
    // if the operation has only started, else the ticks at which it ended.
    std::atomic<uint64_t> outcome{0};
    std::atomic<uint32_t> operation{0};
  };

  // Aligned to a cache line: ranks count at the same time.
  struct alignas(64) Ring {
    std::atomic<uint64_t> count{0};
    std::atomic<Slot*> slots{nullptr};  // made by the rank's first operation
    int group = 0;
    int rank = 0;
    int64_t device = 0;
  };

  static uint64_t EntriesOf(int64_t ranks);
  Slot* MakeSlots(Ring& ring);

  const TickScale scale_;
  uint64_t mask_ = 0;            // entries per rank, less 1
  std::vector<int> first_ring_;  // by group
  std::unique_ptr<Ring[]> rings_;
  int num_rings_ = 0;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_FLIGHT_FLIGHT_RECORDER_H_
