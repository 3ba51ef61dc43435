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

#include <memory>
#include <utility>
#include <vector>

#include "ffi/core/call_site.h"
#include "ffi/core/status.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

struct Continuation {
  xla::ffi::Promise promise;
  Status status;  // what the promise completes with
};

// Starts the threads that Continue() cannot do without, once for the process. Fails if
// the system refuses them.
Status StartContinuing();

// Completes the promises, soon, on threads of ours. Never blocks. `gap`: of the call
// site, learned and made use of here.
void Continue(std::vector<Continuation> continuations, const std::shared_ptr<Gap>& gap);

// Whether this thread is one of them: who waits on it keeps others from going on.
bool OnContinuer();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_CONTINUER_H_
