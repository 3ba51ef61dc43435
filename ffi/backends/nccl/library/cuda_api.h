// The part of the CUDA driver's interface that we use, declared by ourselves. It serves
// CUDA 12 and 13 and needs no toolkit.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_CUDA_API_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_CUDA_API_H_

#include <cstddef>
#include <cstdint>

#include "ffi/backends/nccl/library/library_api.h"

namespace jaxcomm::cuda {

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotReady = 600,
  kPeerAccessAlreadyEnabled = 704,
};

using Device = int;
using Context = struct ContextHandle*;
using Stream = void*;
using Event = struct EventHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Pointer = uint64_t;

// Names memory to another process.
struct IpcHandle {
  char reserved[64];
};
using HostFunction = void (*)(void*);

enum CaptureStatus : int { kCaptureNone = 0, kCaptureActive = 1 };
inline constexpr unsigned kStreamNonBlocking = 1;
// Lower is higher; the driver takes the nearest that a device has.
inline constexpr int kHighestPriority = -16;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kIpcEnablePeerAccess = 1;

// What a stream does with a word of memory, without a kernel: CUstreamBatchMemOpParams.
struct MemoryOperation {
  enum Kind : unsigned { kWait = 4, kWrite = 5 };  // of 64 bits

  Kind kind = kWait;
  Pointer address = 0;
  uint64_t value = 0;
  unsigned flags = 0;  // 0: a wait ends at this value or a greater one
  Pointer alias = 0;
  uint64_t reserved = 0;
};
static_assert(sizeof(MemoryOperation) == 48);

// A copy of rows: CUDA_MEMCPY2D.
struct Rows {
  static constexpr unsigned kDevice = 2;

  size_t from_x = 0, from_y = 0;
  unsigned from_kind = kDevice;
  const void* from_host = nullptr;
  Pointer from = 0;
  void* from_array = nullptr;
  size_t from_pitch = 0;  // bytes from one row to the next
  size_t to_x = 0, to_y = 0;
  unsigned to_kind = kDevice;
  void* to_host = nullptr;
  Pointer to = 0;
  void* to_array = nullptr;
  size_t to_pitch = 0;
  size_t row_bytes = 0, rows = 0;
};
static_assert(sizeof(Rows) == 128);

// name as exported, name of ours, result, parameters.
// clang-format off
#define JAXCOMM_CUDA_FUNCTIONS(F)                                                   \
  F(cuInit, Init, (unsigned))                                                       \
  F(cuDriverGetVersion, DriverGetVersion, (int*))                                   \
  F(cuGetErrorString, GetErrorString, (Result, const char**))                       \
  F(cuDeviceGet, DeviceGet, (Device*, int))                                         \
  F(cuDevicePrimaryCtxRetain, DevicePrimaryCtxRetain, (Context*, Device))           \
  F(cuDevicePrimaryCtxRelease_v2, DevicePrimaryCtxRelease, (Device))                \
  F(cuCtxPushCurrent_v2, CtxPushCurrent, (Context))                                 \
  F(cuCtxPopCurrent_v2, CtxPopCurrent, (Context*))                                  \
  F(cuDeviceCanAccessPeer, DeviceCanAccessPeer, (int*, Device, Device))             \
  F(cuCtxEnablePeerAccess, CtxEnablePeerAccess, (Context, unsigned))                \
  F(cuStreamCreateWithPriority, StreamCreateWithPriority, (Stream*, unsigned, int)) \
  F(cuStreamDestroy_v2, StreamDestroy, (Stream))                                    \
  F(cuStreamQuery, StreamQuery, (Stream))                                           \
  F(cuStreamSynchronize, StreamSynchronize, (Stream))                               \
  F(cuStreamWaitEvent, StreamWaitEvent, (Stream, Event, unsigned))                  \
  F(cuStreamIsCapturing, StreamIsCapturing, (Stream, CaptureStatus*))               \
  F(cuStreamBatchMemOp_v2, StreamBatchMemOp,                                        \
    (Stream, unsigned, MemoryOperation*, unsigned))                                 \
  F(cuLaunchHostFunc, LaunchHostFunc, (Stream, HostFunction, void*))                \
  F(cuEventCreate, EventCreate, (Event*, unsigned))                                 \
  F(cuEventDestroy_v2, EventDestroy, (Event))                                       \
  F(cuEventRecord, EventRecord, (Event, Stream))                                    \
  F(cuEventQuery, EventQuery, (Event))                                              \
  F(cuMemGetInfo_v2, MemGetInfo, (size_t*, size_t*))                                \
  F(cuMemAlloc_v2, MemAlloc, (Pointer*, size_t))                                    \
  F(cuMemFree_v2, MemFree, (Pointer))                                               \
  F(cuMemcpyDtoDAsync_v2, MemcpyDtoDAsync, (Pointer, Pointer, size_t, Stream))      \
  F(cuMemcpy2DAsync_v2, Memcpy2DAsync, (const Rows*, Stream))                       \
  F(cuMemcpyHtoDAsync_v2, MemcpyHtoDAsync, (Pointer, const void*, size_t, Stream))  \
  F(cuMemcpyDtoHAsync_v2, MemcpyDtoHAsync, (void*, Pointer, size_t, Stream))        \
  F(cuMemsetD8Async, MemsetD8Async, (Pointer, unsigned char, size_t, Stream))       \
  F(cuMemAllocHost_v2, MemAllocHost, (void**, size_t))                              \
  F(cuMemFreeHost, MemFreeHost, (void*))                                            \
  F(cuIpcGetMemHandle, IpcGetMemHandle, (IpcHandle*, Pointer))                      \
  F(cuIpcOpenMemHandle_v2, IpcOpenMemHandle, (Pointer*, IpcHandle, unsigned))       \
  F(cuIpcCloseMemHandle, IpcCloseMemHandle, (Pointer))                              \
  F(cuModuleLoadData, ModuleLoadData, (Module*, const void*))                       \
  F(cuModuleUnload, ModuleUnload, (Module))                                         \
  F(cuModuleGetFunction, ModuleGetFunction, (Function*, Module, const char*))       \
  F(cuLaunchKernel, LaunchKernel,                                                   \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,          \
     unsigned, Stream, void**, void**))
// clang-format on

struct Api {
#define JAXCOMM_DECLARE(exported, name, parameters) \
  LibraryFunction<Result(*) parameters> name{nullptr, "cu" #name};
  JAXCOMM_CUDA_FUNCTIONS(JAXCOMM_DECLARE)
#undef JAXCOMM_DECLARE
};

}  // namespace jaxcomm::cuda

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_CUDA_API_H_
