// Threads on which ranks continue that waited in a collective.
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
#include <vector>

#include "ffi/base/status.h"
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

// Set when a program was seen to block before its next wait. From then on each program
// gets a thread at once. (Ten calls in turn with jax.lax's among 8 devices on 2 cores:
// 8 times as long without this.)
using StallFlag = std::shared_ptr<std::atomic<bool>>;

// Completes the promises, soon, on threads of ours. Never blocks. `stalls`: the call
// site's, or null.
void Continue(std::vector<Continuation> continuations, StallFlag stalls = nullptr);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_CONTINUER_H_
