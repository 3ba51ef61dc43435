// The shared memory of a set of processes, the one place where they meet. All
// communicators of the set share it.
//
// A collective that spans processes takes one *crossing*: a slot of a table, found
// by key. Each process has a seat in it, with a few KiB for small operands. A large
// operand is streamed through a *channel*: every process owns a ring of slots in it,
// which it alone writes and the others read. The slots stay in the cache.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_ARENA_ARENA_H_
#define JAXCOMM_FFI_BACKENDS_HOST_ARENA_ARENA_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/backends/host/arena/arena_memory.h"
#include "ffi/base/status.h"

namespace jaxcomm {

struct CrossingKey {
  uint64_t communicator = 0;  // with its generation
  uint64_t group = 0;
  uint64_t run = 0;  // number of the run
  uint64_t tag = 0;

  uint64_t Hash() const;
};

// Whom a process wants to meet, and where.
struct CrossingRequest {
  CrossingKey key;
  uint64_t members = 0;  // mask of processes
  uint64_t signature = 0;
  uint64_t number = 0;    // of the round in its group, for messages
  std::string_view call;  // for messages: "psum(float32[4]) over axes ('i',)"
};

// Functions named Locked require the lock of the memory.
class Arena : public ArenaMemory {
 public:
  // A view of the segment for one of its processes. Messages call them by `names`.
  Arena(std::shared_ptr<Segment> segment, std::vector<int> names, int self);
  ~Arena();

  int self() const { return self_; }

  // Takes this process's seat in the oldest crossing of that key at which it has not
  // been, and opens one if there is none. Returns null if the table is full of others:
  // try again when the doorbell rings. Returns null, too, if status() is a failure.
  // Fails the crossing if the signatures differ. Leave a failed crossing.
  // `wants_channel`: its operands are to be streamed.
  Crossing* Join(const CrossingRequest& request, bool wants_channel);
  // Gives an open crossing a channel if all its members are here, or if many channels
  // are free: then it is sure to end and to return the channel. If none is free, try
  // again when the doorbell rings.
  void TryAssignChannel(Crossing* crossing);
  // Frees this process's seat. The crossing is free once all members have left.
  void Leave(Crossing* crossing);
  // Frees the seat of a process that has ended, in a failed crossing.
  void Abandon(Crossing* crossing, int process);
  // Frees the seats, crossings and channels that processes held when they ended. If a
  // process waits in such a crossing, that process fails it and then abandons it.
  void ReleaseHoldings(uint64_t ended);

  // Fails the crossing for all its members, then all others. The first failure stands.
  void Fail(Crossing* crossing, const Status& error);
  // Fails what the processes do together, and from now on refuses what they begin.
  void FailAll(const Status& error);

  // The processes of a mask that wait for each other for good, if they stand still: in
  // each crossing in which one of them is seated, it lacks another one of them.
  uint64_t WaitForEachOther(uint64_t processes) const;
  // The processes that say that they stand still.
  uint64_t standing_still() const;

  // Wakes the other processes of the mask that sleep while they wait for others.
  void Ring(uint64_t mask) const;
  // Wakes this process's own thread.
  void RingSelf() const { process(self_).doorbell.RingOwn(); }

  // Open crossings in which `process` is seated, "psum(float32[4])" each.
  std::vector<std::string> CallsOf(int process) const;

 private:
  // Places for a key.
  struct Places {
    Crossing* found = nullptr;  // open, and this process has not been there
    Crossing* free = nullptr;
  };
  Places FindLocked(const CrossingKey& key) const;
  void OpenLocked(Crossing* crossing, const CrossingRequest& request);
  void AssignChannelLocked(Crossing* crossing);
  void ReturnChannelLocked(Crossing* crossing);
  // Asks for a ring when a crossing of the table, or a channel, is returned.
  void AskToBeRungLocked();
  void LeaveSeat(Crossing* crossing, int process);
  void CleanUp(Crossing* crossing);
  // Returns whether there was anything to free.
  bool CleanUpLocked(Crossing* crossing);

  // Rings the processes of a mask, this one included.
  void RingAll(uint64_t mask) const;

  void FailLocked(Crossing* crossing, ErrorCode code, std::string_view text);
  void FailIfCallsDifferLocked(Crossing* crossing, const CrossingRequest& request);
  // The first failure stands.
  void FailAllLocked(std::string_view text);
  uint64_t everyone() const { return ~uint64_t{0} >> (kMaxProcesses - processes()); }

  const std::vector<int> names_;
  const int self_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_ARENA_ARENA_H_
