// Finds out that processes wait for each other for good, in different collectives.
//
// To wait in different collectives is no error while one of the processes computes, or
// sleeps: it will come. It is one if each of them stands still, and in each collective
// in which one of them waits it lacks another one of them. Then none ever goes on.
//
// A process says that it stands still, for others to read, only while its own thread
// sleeps: all that could wake the process comes by that thread. So of processes that
// say it at one time, what they lack is true at that time.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_ARENA_DEADLOCK_H_
#define JAXCOMM_FFI_BACKENDS_HOST_ARENA_DEADLOCK_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "ffi/backends/host/arena/arena.h"
#include "ffi/backends/host/arena/transfer.h"

namespace jaxcomm {

// The transfers of this process, in all sets, that wait for others.
std::atomic<size_t>& WaitsOfProcess();

struct Grace {
  static constexpr double kSeconds = 2;

  // How long a process must have stood still. What a library of another thread brings,
  // such as an answer of gRPC, can come meanwhile. 0: no time, in tests, where whoever
  // rings has the thread look.
  double seconds = kSeconds;
  // Whether the process has stood still since the last call. `waits`: its transfers in
  // this set that wait for others.
  std::function<bool(size_t waits)> stands_still;
  // Called once, when the process waits for another one for the first time.
  std::function<void()> learn = [] {};

  // Looks at the threads of this process.
  static Grace OfThisProcess(double seconds = kSeconds);
};

class Deadlock {
 public:
  using Clock = std::chrono::steady_clock;

  Deadlock(Arena* arena, Grace grace) : arena_(arena), grace_(std::move(grace)) {}

  // The process waits for another one for the first time.
  void Begin() const { grace_.learn(); }
  // For how long the thread may sleep before it looks.
  double seconds() const;

  // Before the thread sleeps. `transfers`: all in which this process waits. `since`:
  // from when on none of them moved. Returns the processes of a deadlock, as a mask, if
  // this one is to tell them. 0 if none is proven.
  uint64_t Find(const std::vector<const Transfer*>& transfers, uint64_t gone,
                Clock::time_point since, Clock::time_point now);
  // After the thread has slept.
  void GoOn();

 private:
  uint64_t me() const { return uint64_t{1} << arena_->self(); }
  bool HasStoodStill(size_t waits, Clock::time_point now);

  Arena* const arena_;
  const Grace grace_;
  std::optional<Clock::time_point> still_since_;
  Clock::time_point looked_{};
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_ARENA_DEADLOCK_H_
