// The interface that a backend implements. A communicator holds one partition of
// devices: this process's ranks of every group, under one key.
#ifndef JAXCOMM_FFI_CORE_COMMUNICATOR_H_
#define JAXCOMM_FFI_CORE_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/core/call_site.h"
#include "ffi/flight/flight_record_format.h"
#include "ffi/flight/flight_recorder.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// Runs tasks on other threads. XLA's thread pool is valid only while a handler is on
// the stack. Tests have their own.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  virtual int64_t num_threads() const = 0;
  virtual void Schedule(std::function<void()> task) = 0;
};

// One rank's arrival at a call site.
struct Call {
  CallSite* site = nullptr;
  int64_t run_id = 0;                     // the same on every rank of one launch
  uint64_t tag = 0;                       // ranks of one run meet by it
  uint64_t shared_tag = 0;                // likewise, ranks of several processes
  int64_t device_id = 0;                  // global; local for devices with streams
  const void* const* operands = nullptr;  // one per site->operands()
  void* const* results = nullptr;         // one per site->results()
  Scheduler* scheduler = nullptr;
  bool may_be_captured = false;  // in a CUDA graph
};

class ProcessSet;

// What a communicator is made of.
struct CommunicatorSpec : CommunicatorSummary {
  // For groups that span processes. `processes`: of each rank, as an index into the
  // set, or as JAX's index if there is no set. `generation`: how many communicators of
  // this key there were before on these processes.
  std::shared_ptr<ProcessSet> process_set;
  std::vector<std::vector<int>> processes;
  uint64_t generation = 0;

  // For CPU devices: why ranks of this process may be unable to come, and what to do
  // about it. Empty if no reason is known.
  std::string hint_if_late;

  // Of all groups, in all processes.
  size_t num_ranks() const {
    size_t count = 0;
    for (const auto& group : groups) count += group.size();
    return count;
  }
};

// "the communicator over axes ('i',) (lane 'default')".
std::string NameOf(const CommunicatorSpec& spec);

struct CommunicatorStats {
  int64_t bytes = 0;         // handed in by this process's ranks
  int64_t host_bytes = 0;    // held by the communicator, on the host
  int64_t device_bytes = 0;  // held by it on all devices of this process
  int64_t in_flight = 0;     // calls in which a rank waits
  // Completed calls of one group, by collective.
  std::vector<std::pair<std::string, int64_t>> calls;
  // Seconds that this process waited for others, by JAX's index of the other process.
  std::vector<std::pair<int, double>> waited_for;
};

class Communicator {
 public:
  explicit Communicator(CommunicatorSpec spec);
  virtual ~Communicator() = default;

  // For CPU devices: takes part in a collective for one rank. The buffers of `call`
  // stay valid, and belong to the communicator, until the future completes. Makes no
  // copy of them, and never blocks on another rank. Every rank's future completes, with
  // an error if a rank is missing at the timeout. The start of a split-phase collective
  // is such a call, too, whose future may stay pending until its end: XLA computes what
  // does not need the results, and frees no buffer, not even if the program fails in
  // between.
  virtual xla::ffi::Future Execute(const Call& call);

  // For devices with streams: enqueues the collective on `stream` and returns at once.
  // A later error ends the communicator, and its next call returns that error.
  virtual Status Enqueue(const Call& call, void* stream);

  // The split-phase collective. `stream` goes on while the results arrive, and waits
  // for them at EnqueueDone, whose results are the same buffers, and whose operands are
  // those of EnqueueStart, and arrays that it does not read.
  virtual Status EnqueueStart(const Call& call, void* stream);
  virtual Status EnqueueDone(const Call& call, void* stream);

  // The user has interrupted a program. What a rank waits in now fails if it does not
  // end within a second: the next program needs the devices.
  virtual void Interrupt() {}

  // Ends every pending call, and every later one, with `reason`.
  virtual void Abort(const Status& reason) = 0;

  // A rank of a run has failed, here or in another communicator of this process, and
  // will come to none of the run's calls. Ends those that wait for it, and refuses
  // those that come later.
  virtual void EndRun(int64_t, const Status&) {}

  // Returns the last runs that have failed in it.
  virtual std::vector<int64_t> FailedRuns() const { return {}; }

  virtual CommunicatorStats stats() const = 0;

  const CommunicatorSpec& spec() const { return spec_; }

  // The backend records here each operation of its ranks, and how it ended.
  FlightRecorder& recorder() { return *recorder_; }
  const FlightRecorder& recorder() const { return *recorder_; }

 private:
  const CommunicatorSpec spec_;
  const std::shared_ptr<FlightRecorder> recorder_;
};

// Returns a future that has already failed.
xla::ffi::Future FailedFuture(Status status);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_COMMUNICATOR_H_
