// Threads on which ranks continue that waited in a collective.
//
// Completing a promise runs the waiting rank's program on, in the completing
// thread, until its next wait. The last rank to arrive must not do that in its own
// handler: if the other rank's program comes to something that blocks (a jax.lax
// collective of XLA:CPU does, until every rank is there), it blocks the very rank
// it waits for. On a thread of ours it holds up nobody but the promises queued
// behind it, and those are taken over by another thread.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_CONTINUER_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_CONTINUER_H_

#include <memory>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/core/call_site.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

struct Continuation {
  xla::ffi::Promise promise;
  Status status;  // what the promise completes with
};

// Completes the promise on this thread: runs the program that waits for it, up to its
// next wait.
void CompleteHere(Continuation continuation);

// Starts the threads that Continue() cannot do without, once for the process. Fails if
// the system refuses them.
Status StartContinuing();

// Completes the promises, soon, on threads of ours. Never blocks. `pace`: the call
// site's, or null.
void Continue(std::vector<Continuation> continuations,
              std::shared_ptr<Pace> pace = nullptr);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_CONTINUER_H_
