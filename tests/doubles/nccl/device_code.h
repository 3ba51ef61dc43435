// CUDA C++ for the host, as far as kernels.cu uses it. To be included before
// kernels.cu, in one file only: it defines the words of the language as macros.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_DEVICE_CODE_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_DEVICE_CODE_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/doubles/nccl/grid.h"

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)

namespace jaxcomm {

namespace fake {
#include "ffi/backends/host/reduce/small_float.h"
}  // namespace fake

// The place of the calling thread in its grid.
#define threadIdx (::jaxcomm::fake::this_thread.thread)
#define blockIdx (::jaxcomm::fake::this_thread.block)
#define blockDim (::jaxcomm::fake::this_thread.threads)
#define gridDim (::jaxcomm::fake::this_thread.blocks)

inline int __syncthreads_or(int value) { return fake::WaitForBlock(value != 0); }
inline void __syncthreads() { fake::WaitForBlock(false); }

inline float __uint_as_float(uint32_t bits) { return fake::BitsToFloat(bits); }
inline uint32_t __float_as_uint(float value) { return fake::FloatToBits(value); }
inline float WidenFloat16(uint16_t bits) { return fake::Widen(fake::Float16{bits}); }
inline uint16_t RoundToFloat16(float value) {
  fake::Float16 rounded;
  fake::Narrow(value, &rounded);
  return rounded.bits;
}

template <typename Word>
Word LoadRelaxed(const Word* from) {
  fake::Polls(from);
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline uint64_t LoadAcquire(const uint64_t* from) {
  fake::Polls();
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}

// Released: what a device has written by then the host may read.
template <typename Word>
void StoreRelaxed(Word* to, Word value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}

inline void FenceSystem() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

[[noreturn]] inline void LoadMisaligned(uint64_t) { fake::Fault(); }

}  // namespace jaxcomm

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_DEVICE_CODE_H_
