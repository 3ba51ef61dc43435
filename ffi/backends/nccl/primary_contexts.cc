#include "ffi/backends/nccl/primary_contexts.h"

#include "ffi/backends/nccl/device_stop.h"
#include "ffi/os/forked.h"

namespace jaxcomm {

PrimaryContexts::PrimaryContexts(const NcclLibrary& library,
                                 const std::vector<NcclDevice>& devices)
    : library_(library) {
  for (const NcclDevice& device : devices) {
    if (status_.success()) status_ = Retain(device.ordinal);
  }
  contexts_.resize(devices.size(), nullptr);
}

Status PrimaryContexts::Retain(int ordinal) {
  cuda::Device device = 0;
  RETURN_IF_ERROR(library_.Try(library_.cuda.DeviceGet, &device, ordinal));
  cuda::Context context = nullptr;
  RETURN_IF_ERROR(library_.Try(library_.cuda.DevicePrimaryCtxRetain, &context, device));
  devices_.push_back(device);
  contexts_.push_back(context);
  return PrepareDeviceStop(library_, context);
}

PrimaryContexts::~PrimaryContexts() {
  if (IsForked()) return;
  for (cuda::Device device : devices_) library_.cuda.DevicePrimaryCtxRelease(device);
}

}  // namespace jaxcomm
