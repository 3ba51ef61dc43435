// The interface a backend implements. A communicator is one partition of
// devices made live: this process's ranks of every group, under one key.
#ifndef JAXCOMM_FFI_CORE_COMMUNICATOR_H_
#define JAXCOMM_FFI_CORE_COMMUNICATOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/core/call_site.h"
#include "ffi/core/status.h"
#include "ffi/flight/flight_recorder.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// Runs a task on another thread. Handed down from XLA's thread pool, which is
// only valid while a handler is on the stack; tests hand in their own.
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
  uint64_t tag = 0;                       // the same where ranks of one run are to meet
  uint64_t shared_tag = 0;                // the same on other processes too
  int64_t device_id = 0;                  // global; local where there is a stream
  const void* const* operands = nullptr;  // one per site->operands()
  void* const* results = nullptr;         // one per site->results()
  Scheduler* scheduler = nullptr;
  void* borrowed = nullptr;      // XLA's ncclComm_t, where the communicator has none
  bool may_be_captured = false;  // in a CUDA graph
};

class ProcessSet;

// What a communicator is made of and named by.
struct CommunicatorSpec {
  int64_t key = 0;
  std::string axes;  // "('data', 'context')"
  std::string lane;
  std::string backend;
  std::string platform;  // names devices in messages: "cpu"
  double timeout_seconds = 300;
  std::vector<std::vector<int64_t>> groups;  // global device ids, in rank order

  // Where groups span processes: the process of each rank, as an index into the set, or
  // JAX's index where there is none; and how many communicators of this key there were
  // before on these processes.
  std::shared_ptr<ProcessSet> process_set;
  std::vector<std::vector<int>> processes;
  uint64_t generation = 0;

  // Of CPU devices: why ranks of this process may be unable to come, and what to do
  // about it. Empty if no reason is known.
  std::string hint_if_late;
};

struct CommunicatorStats {
  int64_t bytes = 0;            // handed in by this process's ranks
  int64_t host_bytes = 0;       // held by the communicator itself
  int64_t device_bytes = 0;     // likewise, on all devices of this process
  int64_t in_flight = 0;        // calls that some rank waits in
  int64_t symmetric_calls = 0;  // whose buffers all lay in symmetric memory
  int64_t copied_calls = 0;     // that copy engines did
  int64_t one_shot_calls = 0;   // that a kernel of ours did in NCCL's place
  bool is_suspended = false;
  // Of NCCL's backend: whether that kernel does small sums, "yes" or "no: " and why.
  std::string one_shot;
  // Completed calls of one group, by collective.
  std::vector<std::pair<std::string, int64_t>> calls;
};

// What XLA is to be asked for, where it lends a communicator for each call: places of a
// program's devices, group by group, and a number that tells its communicators of the
// same devices apart.
struct Borrowed {
  std::vector<std::vector<int64_t>> groups;
  int64_t communication_id = 0;
};

class Communicator {
 public:
  explicit Communicator(CommunicatorSpec spec);
  virtual ~Communicator() = default;

  // Takes part in a collective for one rank. The buffers of `call` stay valid,
  // and belong to the communicator, until the future completes; no copy of them
  // is made. Never blocks on another rank. Every rank's future completes, with
  // an error if a rank is missing when the deadline passes.
  virtual xla::ffi::Future Execute(const Call& call) = 0;

  // The same for a device with streams: gives `stream` the work and returns at once.
  // Errors that come later end the communicator, and its next call says which.
  virtual Status Enqueue(const Call& call, void* stream);

  // The same by halves: `stream` goes on while the results arrive, and waits for them
  // at EnqueueDone, whose results are the same buffers.
  virtual Status EnqueueStart(const Call& call, void* stream);
  virtual Status EnqueueDone(const Call& call, void* stream);

  // The two halves of a collective. Start begins it and fills the results; Done, whose
  // operands are those of the start, its results, and arrays that nobody reads, ends
  // when they are filled, and hands them on. On CPU devices a start's future may stay
  // pending until then: XLA meanwhile computes what does not need the results, and
  // lets go of no buffer, also when the program fails in between.
  virtual xla::ffi::Future Start(const Call& call) { return Execute(call); }
  virtual xla::ffi::Future Done(const Call& call);

  // Ends every pending call, and every later one, with `reason`.
  virtual void Abort(const Status& reason) = 0;

  // Runs that failed here and in which some rank has not come yet.
  virtual std::vector<int64_t> FailedRuns() const { return {}; }

  virtual CommunicatorStats stats() const = 0;

  // What XLA is to lend for each call; null if the communicator has what it needs.
  virtual const Borrowed* borrowed() const { return nullptr; }

  const CommunicatorSpec& spec() const { return spec_; }

  // A backend records here what each of its ranks takes part in, and how it ended.
  FlightRecorder& recorder() { return *recorder_; }
  const FlightRecorder& recorder() const { return *recorder_; }

 private:
  const CommunicatorSpec spec_;
  const std::shared_ptr<FlightRecorder> recorder_;
};

// A future that has already failed.
xla::ffi::Future FailedFuture(Status status);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_COMMUNICATOR_H_
