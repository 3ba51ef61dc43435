// The GPU instructions of kernels.cu that CUDA C++ names only in headers, which NVRTC's
// wheel lacks.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_INSTRUCTIONS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_INSTRUCTIONS_H_

#include <cstdint>

namespace jaxcomm {

// Relaxed and of system scope: memory of other GPUs and of the host.
inline __device__ uint32_t LoadRelaxed(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(from)
               : "memory");
  return value;
}

inline __device__ uint64_t LoadRelaxed(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(from)
               : "memory");
  return value;
}

inline __device__ void StoreRelaxed(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;"
               :
               : "l"(to), "l"(value)
               : "memory");
}

inline __device__ void StoreRelaxed(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;"
               :
               : "l"(to), "r"(value)
               : "memory");
}

// What others have written before what it finds, the thread sees from now on.
inline __device__ uint64_t LoadAcquire(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(from)
               : "memory");
  return value;
}

// What the thread has written by now, others see before what it writes from now on.
inline __device__ void FenceSystem() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

inline __device__ float WidenFloat16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// To nearest, ties to even.
inline __device__ uint16_t RoundToFloat16(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Faults. `address` is of 4 bytes and no multiple of 4. Volatile twice: neither NVRTC
// nor the driver's assembler may drop a load whose result is not used.
inline __device__ void LoadMisaligned(uint64_t address) {
  asm volatile(
      "{\n"
      "  .reg .u32 unused;\n"
      "  ld.volatile.global.u32 unused, [%0];\n"
      "}"
      :
      : "l"(address)
      : "memory");
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_INSTRUCTIONS_H_
