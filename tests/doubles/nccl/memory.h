// Device memory: how much each device has left, and what was allocated from it.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_MEMORY_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_MEMORY_H_

#include <cstddef>
#include <cstdint>

namespace jaxcomm::fake {

// Takes pretended memory from a device, or gives it back. False: there is not enough.
bool Reserve(int device, int64_t bytes);
void Release(int device, int64_t bytes);

// Whether [data, data + bytes) lies in one allocation of ncclMemAlloc: windows need it.
bool IsWindowMemory(const void* data, size_t bytes);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_MEMORY_H_
