// How a crossing fails, and how processes that had completed it learn of that.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_CROSSING_FAILURES_H_
#define JAXCOMM_FFI_BACKENDS_HOST_CROSSING_FAILURES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/backends/host/arena_memory.h"
#include "ffi/base/status.h"

namespace jaxcomm {

// The base of an Arena. Functions named Locked require the lock of the memory.
class CrossingFailures : public ArenaMemory {
 public:
  // A view of the segment for one of its processes. Messages call them by `names`.
  CrossingFailures(std::shared_ptr<Segment> segment, std::vector<int> names, int self);

  int self() const { return self_; }

  // Fails the crossing for all its members. The first failure stands.
  void Fail(Crossing* crossing, const Status& error);
  // Call this with a crossing whose failure this process reports: a late failure of its
  // group is then reported, too.
  void ForgetLateFailure(const Crossing* crossing);

  // Wakes the other processes of the mask that sleep while they wait for others.
  void Ring(uint64_t mask) const;
  // Wakes this process's own thread.
  void RingSelf() const { process(self_).doorbell.RingOwn(); }

 protected:
  bool IsSeated(const Crossing* crossing, int process) const {
    const uint32_t state =
        seat(crossing, process).state.load(std::memory_order_acquire);
    return state == Seat::kHere || state == Seat::kReady;
  }
  // Rings the processes of a mask, this one included.
  void RingAll(uint64_t mask) const;
  void FailIfCallsDifferLocked(Crossing* crossing, uint64_t signature,
                               std::string_view call);
  // Fails `crossing` if a late failure is pending for its group.
  void FailIfLateFailureLocked(Crossing* crossing);

 private:
  void FailLocked(Crossing* crossing, ErrorCode code, std::string_view text);
  // Fails the call that each member which has left is in, or makes next in that group.
  void FailThoseWhoLeftLocked(const Crossing* crossing, const std::string& text);
  // The oldest crossing in the group of `like`, not failed, in which a process is.
  Crossing* OldestOfGroupLocked(const Crossing* like, int process) const;
  bool HasLateFailure(const Crossing* crossing) const;

  const std::vector<int> names_;
  const int self_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_CROSSING_FAILURES_H_
