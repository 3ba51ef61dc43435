#include "ffi/backends/nccl/library/primary_contexts.h"

#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/os/forked.h"

namespace jaxcomm {
namespace {

bool CanReach(const NcclLibrary& library, const RankFacts& from, const RankFacts& to) {
  int can = 0;
  if (library.cuda.DeviceCanAccessPeer(&can, from.ordinal, to.ordinal) !=
          cuda::kSuccess ||
      can == 0) {
    return false;
  }
  CurrentContext current(library.cuda, from.context);
  const cuda::Result enabled = library.cuda.CtxEnablePeerAccess(to.context, 0);
  return enabled == cuda::kSuccess || enabled == cuda::kPeerAccessAlreadyEnabled;
}

}  // namespace

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

bool CanReachPeers(const NcclLibrary& library, const std::vector<RankFacts>& ranks) {
  for (const RankFacts& from : ranks) {
    for (const RankFacts& to : ranks) {
      if (to.group == from.group && to.ordinal != from.ordinal &&
          !CanReach(library, from, to)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace jaxcomm
