// The failure of this process, and the order of its end.
//
// Nothing is aborted while a device is at it, unless its results are poisoned first:
// XLA takes what an aborted operation leaves in memory for its result. And what one
// waits for may be what others wait for: their operations wait for the same rank, an
// abort of one waits for the device that another is at, and NCCL's abort flag belongs
// to all that share resources. So a failure is the failure of all communicators of the
// process, and there is one way to end:
//   1. wait a moment for what is about to end;
//   2. refuse every call from now on, and set the poison word, if there is one;
//   3. if a device is at an operation, do what the strictest policy says of those that
//      have some: stop the GPUs of this process (device_stop.h), end the process, or
//      abort the poisoned operations, on threads of their own, since an abort waits for
//      the device, and once other processes have poisoned theirs (world_health.h). What
//      stops GPUs also aborts what keeps threads inside NCCL, which looks at no device
//      there, once no number can leave any more;
//   4. a last resort (last_resort.h) ends the process if a step does not end.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_PROCESS_FAILURE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_PROCESS_FAILURE_H_

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/base/status.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

class Health;
struct LocalRank;

// Why communicators fail.
struct Cause {
  Status reason = OkStatus();
  bool names_a_call = true;  // whether the reason does, as the text of an error must
  // The reason of the flight record that is written if something was in flight; null:
  // none.
  const char* dump = nullptr;
  // Whether the process goes on whatever the policy: a process that closes what it has
  // before it ends keeps its status.
  bool is_closing = false;
};

// Thread-safe. Calls nothing that waits for a device, or for a thread inside NCCL.
class ProcessFailure {
 public:
  // Never destroyed: the watch may look when the process ends.
  static ProcessFailure& Get();

  // From now on a communicator fails with the others, until Remove(). `kept`: keeps it
  // while it is failed or aborted.
  void Add(const Health* health, std::weak_ptr<Health> kept);
  void Remove(const Health* health);

  // Fails all as written above, because one did.
  void Fail(Health& one, const Cause& cause);
  // Fails those that span processes because another process says that something failed
  // there. Also those that are being made.
  void FailAllElsewhere(const std::string& reason);
  // Fails one that the stop of the devices found without an operation.
  void FailStopped(Health& one);

  // Whether a device may be at an operation of any communicator.
  bool IsAnyBusy();
  // Waits for the threads that abort operations and free what failed: a process that
  // ends meanwhile takes the driver from them. Returns whether all are done in time.
  bool WaitForAborts(double seconds);

  // The first cause since the last Forget(), or "".
  std::string first();
  void Forget();

 private:
  using All = std::vector<std::shared_ptr<Health>>;

  // What an abort is for, and so what it waits for first.
  enum class Ends {
    kPoisoned,  // operations whose results are poisoned, in all processes
    // What keeps threads inside NCCL: nothing was in flight, or once the devices are
    // stopped.
    kThreadsInNccl,
  };

  // Those that are not being destroyed.
  All all();
  // The strictest policy of those that are busy, nothing if none is. Waits some
  // milliseconds for what is about to end.
  static std::optional<OnFailure> StrictestSoon(const All& all);
  static std::optional<OnFailure> Strictest(const All& all);
  // Has one and all others refuse calls, and adds those that did not yet. Returns false
  // if `one` had failed.
  static bool FailTogether(Health& one, const All& all, const Cause& cause,
                           const char* meaning, All* failing);
  void AbortElsewhere(Health& health, Ends what);
  static void AbortRank(Health& health, LocalRank& rank, Ends what);

  Mutex mutex_;
  std::map<const Health*, std::weak_ptr<Health>> of_ GUARDED_BY(mutex_);
  std::string first_ GUARDED_BY(mutex_);
  std::atomic<int> aborts_{0};  // threads that abort operations
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_PROCESS_FAILURE_H_
