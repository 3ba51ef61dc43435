// Runs of programs on one device, as all communicators of the process see them.
//
// A program may fail between the start and the end of a split-phase collective. XLA
// then gives the memory of its results away, while NCCL or a copy still is to write
// there: whoever gets it has to be behind that. If one of our calls failed, XLA's
// stream waits at once. If something else did, a later run does.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_DEVICE_RUNS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_DEVICE_RUNS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>

#include "ffi/backends/nccl/library/library.h"
#include "ffi/base/status.h"
#include "ffi/core/communicator.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

// Thread-safe. Requires the device's context.
class DeviceRuns {
 public:
  // Has `stream`, which is XLA's, wait for what earlier runs than that of the call
  // started and did not end, or drops what has not begun.
  using EndEarlier = std::function<Status(const Call& call, cuda::Stream stream)>;

  static DeviceRuns& Of(int ordinal);

  // `owner` started something on the device, from now on until Remove().
  void Add(const void* owner, EndEarlier end_earlier);
  void Remove(const void* owner);

  // To be called for each call before it uses `stream`.
  Status Begin(const Call& call, cuda::Stream stream) {
    // A stream that is being captured may not wait for an event of another.
    const bool is_first = !call.may_be_captured && last_run_.load() != call.run_id;
    return is_first ? EndEarlierRuns(call, stream) : OkStatus();
  }

  // To be called where a call fails, and with it its run.
  void End(const Call& call, cuda::Stream stream) {
    Call later = call;
    later.run_id = kNoRun;
    if (!call.may_be_captured) (void)EndEarlierRuns(later, stream);
  }

 private:
  static constexpr int64_t kNoRun = -1;

  Status EndEarlierRuns(const Call& call, cuda::Stream stream);

  std::atomic<int64_t> last_run_{0};
  Mutex mutex_;
  std::map<const void*, EndEarlier> owners_ GUARDED_BY(mutex_);
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_DEVICE_RUNS_H_
