// Threads on which ranks that waited in a collective go on.
//
// Completing a promise runs the waiting rank's program on, in the completing
// thread, until its next wait. The last rank to arrive must not do that in its own
// handler: if the other rank's program comes to something that blocks (a jax.lax
// collective of XLA:CPU does, until every rank is there), it blocks the very rank
// it waits for. On a thread of ours it holds up nobody but the promises queued
// behind it, and those are taken over by another thread.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_CONTINUER_H_
#define JAXCOMM_FFI_BACKENDS_HOST_CONTINUER_H_

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/status.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// Whether the programs behind a call site were seen to run long or block, so that
// their ranks want a thread each at once. Shared with ranks that outlive the site.
using Stalls = std::shared_ptr<std::atomic<bool>>;

struct Continuation {
  xla::ffi::Promise promise;
  Status status;  // what the promise completes with
};

// Completes the promises, soon, on threads of ours. Never blocks.
void Continue(std::vector<Continuation> continuations, const Stalls& stalls);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_CONTINUER_H_
