// Buffers that communicators were told of.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_REGISTRATIONS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_REGISTRATIONS_H_

#include <cstddef>

namespace jaxcomm::fake {

struct Communicator;

// Says in the trace that memory was freed that a communicator still has registered.
void TraceIfRegistered(const void* data, size_t bytes);

// What ncclCommDestroy and ncclCommAbort do with what nobody deregistered.
void DropRegistrations(Communicator* communicator);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_REGISTRATIONS_H_
