#include "ffi/backends/nccl/kernels/device_kernels.h"

#include <map>

#include "ffi/backends/nccl/kernels/kernels_ptx.inc"
#include "ffi/os/mutex.h"

namespace jaxcomm {
namespace {

// As many as fill memory at an SM's full rate.
constexpr unsigned kPoisonThreads = 256;

}  // namespace

ErrorOr<std::shared_ptr<const DeviceKernels>> DeviceKernels::Load(
    const NcclLibrary& library, cuda::Context context) {
  static auto& mutex = *new Mutex;
  static auto& loaded =
      *new std::map<cuda::Context, std::weak_ptr<const DeviceKernels>>;
  MutexLock lock(mutex);
  if (auto kernels = loaded[context].lock()) return kernels;
  std::shared_ptr<DeviceKernels> made(new DeviceKernels(library, context));
  RETURN_IF_ERROR(made->LoadModule());
  loaded[context] = made;
  return made;
}

DeviceKernels::~DeviceKernels() {
  CurrentContext current(library_.cuda, context_);
  if (module_ != nullptr) library_.cuda.ModuleUnload(module_);
}

Status DeviceKernels::LoadModule() {
  CurrentContext current(library_.cuda, context_);
  if (Status status = library_.Try(library_.cuda.ModuleLoadData, &module_, kKernelsPtx);
      status.failure()) {
    module_ = nullptr;
    return status;
  }
  // Now: CUDA puts a kernel on the device when it is first asked for, and that may wait
  // for the kernels that these two are to end.
  ASSIGN_OR_RETURN(stop_, Find(kStopKernel));
  ASSIGN_OR_RETURN(poison_, Find(kPoisonKernel));
  return OkStatus();
}

ErrorOr<cuda::Function> DeviceKernels::Find(const char* name) const {
  CurrentContext current(library_.cuda, context_);
  cuda::Function function = nullptr;
  RETURN_IF_ERROR(
      library_.Try(library_.cuda.ModuleGetFunction, &function, module_, name));
  return function;
}

Status DeviceKernels::Stop(uint64_t address, cuda::Stream stream) const {
  CurrentContext current(library_.cuda, context_);
  void* parameters[] = {&address};
  return library_.Try(library_.cuda.LaunchKernel, stop_, 1, 1, 1, 1, 1, 1, 0, stream,
                      parameters, nullptr);
}

Status DeviceKernels::Poison(const PoisonArguments& arguments,
                             cuda::Stream stream) const {
  CurrentContext current(library_.cuda, context_);
  void* parameters[] = {const_cast<PoisonArguments*>(&arguments)};
  return library_.Try(library_.cuda.LaunchKernel, poison_, 1, 1, 1, kPoisonThreads, 1,
                      1, 0, stream, parameters, nullptr);
}

}  // namespace jaxcomm
