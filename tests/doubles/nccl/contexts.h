// Devices, and which of them a thread works with.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_CONTEXTS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_CONTEXTS_H_

namespace jaxcomm::fake {

inline constexpr int kNoDevice = -1;

// The device of the calling thread's current context; kNoDevice without one.
int CurrentDevice();

// The same, as CUDA's runtime sees it, through which NCCL looks: device 0 without one.
int RuntimeDevice();

// As CUDA's runtime does, through which NCCL looks: a thread without a context has that
// of device 0 from then on.
void UseRuntime();

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_CONTEXTS_H_
