// Split-phase collectives of one rank: XLA's stream goes on while results arrive, and
// waits for them at the end.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_SPLIT_PHASE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_SPLIT_PHASE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "ffi/backends/nccl/library/library.h"
#include "ffi/base/status.h"
#include "ffi/core/communicator.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

// Thread-safe. Requires the device's context.
class SplitPhase {
 public:
  explicit SplitPhase(const NcclLibrary& library) : library_(library) {}

  // Makes and frees a stream and events.
  Status Prepare();
  void Release();

  // The rank's own stream.
  cuda::Stream stream() const { return stream_; }

  // Has give() give the rank's own stream the operation of a call, behind what `stream`
  // was given so far.
  Status Start(const Call& call, cuda::Stream stream,
               const std::function<Status()>& give);
  // Whether Done() was called for all that was started.
  bool all_have_ended();
  // Has `stream` wait for all that earlier runs started and did not end, once for each.
  Status WaitForEarlierRuns(const Call& call, cuda::Stream stream);
  // Has `stream` wait for the results. Returns whether the call was started.
  ErrorOr<bool> Done(const Call& call, cuda::Stream stream);

 private:
  struct Begun {
    const void* mark = nullptr;  // MarkOf() its call
    int64_t run = 0;
    cuda::Event event = nullptr;
    bool is_waited_for = false;  // by a later run
  };

  ErrorOr<cuda::Event> TakeEvent(const void* mark);

  const NcclLibrary& library_;
  cuda::Stream stream_ = nullptr;
  Mutex mutex_;
  std::vector<Begun> begun_ GUARDED_BY(mutex_);
  std::vector<cuda::Event> spare_ GUARDED_BY(mutex_);
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_SPLIT_PHASE_H_
