// How a rank waits in its handler, on its own thread, before it leaves its promise to
// be completed by another thread.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_WAIT_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_WAIT_H_

#include "ffi/backends/host/local/local_round.h"

namespace jaxcomm {

// Whether spinning pays off for a rank that has come. `ranks`: of this process.
bool ShouldSpin(const LocalRound& round, int ranks);

// Spins until the participant is complete, for a moment, and moves what the round
// offers meanwhile. Call this without the lock of the round.
void SpinAndHelp(const LocalParticipant& participant, const Offer& offer);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_WAIT_H_
