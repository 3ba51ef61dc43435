// The shared memory of a set of processes, the one place where they meet. All
// communicators of the set share it.
//
// A collective that spans processes takes one *crossing*: a slot of a table, found
// by key. Each process has a seat in it, with a few KiB for small operands. A large
// operand is streamed through a *channel*: every process owns a ring of slots in it,
// which it alone writes and the others read. The slots stay in the cache.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_ARENA_H_
#define JAXCOMM_FFI_BACKENDS_HOST_ARENA_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/backends/host/arena_memory.h"
#include "ffi/backends/host/store_tuner.h"
#include "ffi/core/status.h"

namespace jaxcomm {

struct CrossingKey {
  uint64_t communicator = 0;  // with its generation
  uint64_t group = 0;
  uint64_t run = 0;  // number of the run
  uint64_t tag = 0;

  uint64_t Hash() const;
};

class Arena : public ArenaMemory {
 public:
  // A view of the segment for one of its processes, of which messages speak by `names`.
  Arena(std::shared_ptr<Segment> segment, std::vector<int> names, int self);
  ~Arena();

  int self() const { return self_; }

  // Takes this process's seat in the crossing of that key at which it has not been,
  // opening it if there is none. Null if the table is full of others: try again when
  // the doorbell rings. Null, too, if status() is a failure.
  // It may have failed, and does if the signatures differ; then leave it.
  // `number`: how many-th call of the group; `wants_channel`: its operands are to be
  // streamed.
  Crossing* Join(const CrossingKey& key, uint64_t members, uint64_t signature,
                 std::string_view call, uint64_t number, bool wants_channel);
  // Gives an open crossing a channel, when all its members are here or channels
  // abound; then it surely ends, and gives the channel back. If none is free, try again
  // when the doorbell rings.
  void TryAssignChannel(Crossing* crossing);
  // Gives this process's seat back; the crossing is free once all have.
  void Leave(Crossing* crossing);
  // To be called with a crossing whose failure this process has seen.
  void Heard(const Crossing* crossing);
  // Fails the crossing for all its members. The first failure stands.
  void Fail(Crossing* crossing, const Status& error);
  // Gives back the seat of a process that has ended, in a failed crossing.
  void Abandon(Crossing* crossing, int process);
  // Gives back the seats, places and channels that processes held when they ended, but
  // for those that others wait for: they fail and then abandon.
  void ReleaseHoldings(uint64_t ended);

  // How this process writes its chunks.
  StoreTuner& tuner() { return tuner_; }

  // Open crossings in which `process` is seated, "psum(float32[4])" each.
  std::vector<std::string> CallsOf(int process) const;

  // Wakes the other processes of the mask that sleep while they wait for others.
  void Ring(uint64_t mask) const;
  // Wakes this process's own thread.
  void RingSelf() const { process(self_).doorbell.RingOwn(); }

 private:
  // Places for a key.
  struct Places {
    Crossing* found = nullptr;  // open, and this process has not been there
    Crossing* free = nullptr;
    Crossing* stale = nullptr;  // failed and empty, kept for those who come late
  };
  Places FindLocked(const CrossingKey& key) const;
  void OpenLocked(Crossing* crossing, const CrossingKey& key, uint64_t members,
                  uint64_t signature, std::string_view call);
  void AssignChannelLocked(Crossing* crossing);
  void ReturnChannelLocked(Crossing* crossing);
  // Has this process rung when a place in the table, or a channel, is returned.
  void AskToBeRungLocked();
  // Rings the processes of a mask, this one included.
  void RingAll(uint64_t mask) const;
  void LeaveSeat(Crossing* crossing, int process);
  void CleanUp(Crossing* crossing);
  // Returns whether there was anything to free.
  bool CleanUpLocked(Crossing* crossing);

  // Failures, and who hears of them: arena_failures.cc.
  void FailLocked(Crossing* crossing, ErrorCode code, std::string_view text);
  void FailIfCallsDifferLocked(Crossing* crossing, uint64_t signature,
                               std::string_view call);
  // Of what the others failed in when this process had finished it.
  void FailIfUnheardLocked(Crossing* crossing);
  // Has the members that were done with it fail in what their group is in, or begins
  // next.
  void TellThoseWhoLeftLocked(const Crossing* crossing, const std::string& text);
  // The oldest crossing of the group of that one, not failed, in which a process waits.
  Crossing* OldestOfGroupLocked(const Crossing* like, int process) const;
  bool IsUnheard(const Crossing* crossing) const;

  const std::vector<int> names_;
  const int self_;
  StoreTuner tuner_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_ARENA_H_
