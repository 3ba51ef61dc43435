#include "ffi/backends/nccl/queue/device_runs.h"

#include <utility>

namespace jaxcomm {

DeviceRuns& DeviceRuns::Of(int ordinal) {
  static Mutex& mutex = *new Mutex;
  static auto& all = *new std::map<int, DeviceRuns>;
  MutexLock lock(mutex);
  return all[ordinal];
}

void DeviceRuns::Add(const void* owner, EndEarlier end_earlier) {
  MutexLock lock(mutex_);
  owners_[owner] = std::move(end_earlier);
}

void DeviceRuns::Remove(const void* owner) {
  MutexLock lock(mutex_);
  owners_.erase(owner);
}

Status DeviceRuns::EndEarlierRuns(const Call& call, cuda::Stream stream) {
  MutexLock lock(mutex_);
  last_run_ = call.run_id;
  Status first = OkStatus();
  for (const auto& [owner, end_earlier] : owners_) {
    Status status = end_earlier(call, stream);
    if (first.success()) first = std::move(status);
  }
  return first;
}

}  // namespace jaxcomm
