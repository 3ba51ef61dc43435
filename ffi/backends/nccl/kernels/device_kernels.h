// The kernels of kernels.h, loaded into a CUDA context.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_DEVICE_KERNELS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_DEVICE_KERNELS_H_

#include <cstdint>
#include <memory>

#include "ffi/backends/nccl/kernels/kernels.h"
#include "ffi/backends/nccl/library/library.h"
#include "ffi/base/status.h"

namespace jaxcomm {

class DeviceKernels {
 public:
  // Returns the kernels of `context`, which all users of the context share. Loads them
  // if no user has them: the driver then compiles them for its GPU, which takes tens of
  // milliseconds and may wait for the device. `library` must outlive the result.
  static ErrorOr<std::shared_ptr<const DeviceKernels>> Load(const NcclLibrary& library,
                                                            cuda::Context context);
  // Unloads them. Requires that no kernel is still to run.
  ~DeviceKernels();
  DeviceKernels(const DeviceKernels&) = delete;
  DeviceKernels& operator=(const DeviceKernels&) = delete;

  // Finds a kernel by its name. Fails if the driver refuses it.
  ErrorOr<cuda::Function> Find(const char* name) const;

  // Enqueues the kernel that makes the device fault. `address`: see kStopKernel.
  Status Stop(uint64_t address, cuda::Stream stream) const;

  // Enqueues the kernel that overwrites results if arguments.word says so.
  Status Poison(const PoisonArguments& arguments, cuda::Stream stream) const;

 private:
  DeviceKernels(const NcclLibrary& library, cuda::Context context)
      : library_(library), context_(context) {}
  Status LoadModule();

  const NcclLibrary& library_;
  const cuda::Context context_;
  cuda::Module module_ = nullptr;
  cuda::Function stop_ = nullptr, poison_ = nullptr;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_KERNELS_DEVICE_KERNELS_H_
