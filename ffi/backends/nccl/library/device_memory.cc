#include "ffi/backends/nccl/library/device_memory.h"

#include <algorithm>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/world.h"

namespace jaxcomm {

int64_t FreeDeviceBytes(const NcclLibrary& library, cuda::Context context) {
  CurrentContext current(library.cuda, context);
  size_t free = 0, total = 0;
  library.cuda.MemGetInfo(&free, &total);
  return static_cast<int64_t>(free);
}

bool AddDeviceBytes(const NcclLibrary& library, nccl::Comm comm, nccl::MemStat stat,
                    int64_t* bytes) {
  uint64_t held = 0;
  if (comm == nullptr || library.nccl.CommMemStats == nullptr ||
      library.nccl.CommMemStats(comm, stat, &held) != nccl::kSuccess) {
    return false;
  }
  *bytes += static_cast<int64_t>(held);
  return true;
}

DeviceMemory::Held DeviceMemory::Measure() const {
  Held held;
  for (cuda::Context context : world_.contexts().all()) {
    held.used -= FreeDeviceBytes(world_.library(), context);
  }
  // NCCL accounts for communicators that share resources as one.
  held.is_accounted = shares_
                          ? world_.AddDeviceBytes(&held.accounted)
                          : comms_.AddBytes(nccl::MemStat::kTotal, &held.accounted) > 0;
  return held;
}

void DeviceMemory::End() {
  const Held after = Measure();
  at_first_ = after.is_accounted ? after.accounted - before_.accounted
                                 : std::max<int64_t>(0, after.used - before_.used);
}

int64_t DeviceMemory::Now() const {
  if (shares_) return at_first_;
  int64_t bytes = 0;
  const size_t accounted = comms_.AddBytes(nccl::MemStat::kTotal, &bytes);
  return accounted == comms_.size() ? bytes : at_first_;
}

}  // namespace jaxcomm
