// A way to carry out collectives on GPUs. engine_choice.h says which one does a call.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ENGINE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ENGINE_H_

#include "ffi/backends/nccl/plans/recipe.h"
#include "ffi/backends/nccl/queue/local_rank.h"
#include "ffi/base/status.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

// Serves the ranks of one communicator in this process. Calls of different ranks may
// come at the same time.
class Engine {
 public:
  virtual ~Engine() = default;

  // Gives `stream` the rank's part of a call, by the rank's launch queue.
  virtual Status Enqueue(const Call& call, const Recipe& recipe, LocalRank& rank,
                         cuda::Stream stream) = 0;

  // The same as a split-phase collective: `stream` goes on while the results arrive,
  // and waits for them at Done(), which returns whether this engine started the call.
  // By default on a stream of the rank's own.
  virtual Status Start(const Call& call, const Recipe& recipe, LocalRank& rank,
                       cuda::Stream stream) {
    return rank.split_phase.Start(call, stream, [&] {
      return Enqueue(call, recipe, rank, rank.split_phase.stream());
    });
  }
  virtual ErrorOr<bool> Done(const Call& call, LocalRank& rank, cuda::Stream stream) {
    return rank.split_phase.Done(call, stream);
  }

  // Ends all waits on the host, and refuses every call from now on.
  virtual void Refuse(const Status&) {}
  // Returns the error that the library reports in the background.
  virtual Status AsyncError(LocalRank&) { return OkStatus(); }
  // Ends what a rank's device is at, without results. It may wait for the device.
  // Requires that all processes have poisoned theirs.
  virtual void Abort(LocalRank&) {}
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ENGINE_H_
