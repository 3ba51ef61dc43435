// Devices: which of them a thread works with, how much memory each has left, and what
// was allocated from it.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_DEVICES_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_DEVICES_H_

#include <cstddef>
#include <cstdint>

namespace jaxcomm::fake {

inline constexpr int kNoDevice = -1;

// The device of the calling thread's current context; kNoDevice without one.
int CurrentDevice();

// The same, as CUDA's runtime sees it, through which NCCL looks: device 0 without one.
int RuntimeDevice();

// As CUDA's runtime does, through which NCCL looks: a thread without a context has that
// of device 0 from then on. It is made if need be, in whichever process: 545 MiB of an
// H200. So it is misuse.
void UseRuntime();
// As CUDA's runtime does: in the place of the calling thread's current context.
void SetDevice(int device);

// Takes pretended memory from a device, or gives it back. False: there is not enough.
bool Reserve(int device, int64_t bytes);
void Release(int device, int64_t bytes);

// Whether [data, data + bytes) lies in one allocation of ncclMemAlloc: windows need it.
bool IsWindowMemory(const void* data, size_t bytes);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_DEVICES_H_
