#include "ffi/core/registry.h"

#include <algorithm>
#include <utility>

#include "ffi/os/forked.h"

namespace jaxcomm {
Registry& Registry::Get() {
  static Registry* const registry = new Registry;
  return *registry;
}

Status Registry::Add(std::shared_ptr<Communicator> communicator) {
  CountForksFromNow();
  MutexLock lock(mutex_);
  const int64_t key = communicator->spec().key;
  if (!communicators_.emplace(key, std::move(communicator)).second) {
    return FailedPrecondition("a communicator with key ", key,
                              " is live; close it before creating it again");
  }
  ++counters_.created;
  return OkStatus();
}

std::shared_ptr<Communicator> Registry::Find(int64_t key) const {
  ReaderLock lock(mutex_);
  auto found = communicators_.find(key);
  return found == communicators_.end() ? nullptr : found->second;
}

ErrorOr<std::shared_ptr<Communicator>> Registry::Find(CallSite& site, int64_t run_id) {
  if (IsForked()) {
    return ForkedError(StrCat(site.ToString(), " over axes ", site.attributes().axes));
  }
  if (failed_runs_.Contains(run_id)) return MissingError(site);
  // All ranks would write to the lock, at every call.
  if (auto known = site.CommunicatorAt(epoch_.load(std::memory_order_acquire))) {
    return known;
  }
  {
    ReaderLock lock(mutex_);
    const auto live = communicators_.find(site.attributes().key);
    if (live != communicators_.end()) {
      site.Remember(live->second, epoch_.load());
      return live->second;
    }
  }
  {
    MutexLock lock(mutex_);
    failed_runs_.Add(run_id);
  }
  const Status missing = MissingError(site);
  EndRun(run_id, missing);
  return missing;
}

Status Registry::Remove(int64_t key) {
  if (IsForked()) return OkStatus();
  std::shared_ptr<Communicator> removed;
  {
    MutexLock lock(mutex_);
    auto found = communicators_.find(key);
    if (found == communicators_.end()) {
      return FailedPrecondition("there is no live communicator with key ", key);
    }
    removed = std::move(found->second);
    communicators_.erase(found);
    ++epoch_;
    ++counters_.destroyed;
  }
  // Outside the lock: the programs of the waiting ranks continue on this thread.
  removed->Abort(FailedPrecondition(NameOf(removed->spec()),
                                    " was closed while a rank waited in it"));
  const std::vector<int64_t> failed = removed->FailedRuns();
  MutexLock lock(mutex_);
  for (int64_t run_id : failed) failed_runs_.Add(run_id);
  return OkStatus();
}

void Registry::Interrupt() const {
  for (const auto& communicator : List()) communicator->Interrupt();
}

void Registry::EndRun(int64_t run_id, const Status& reason) const {
  for (const auto& communicator : List()) communicator->EndRun(run_id, reason);
}

std::vector<std::shared_ptr<Communicator>> Registry::List() const {
  ReaderLock lock(mutex_);
  std::vector<std::shared_ptr<Communicator>> all;
  all.reserve(communicators_.size());
  for (const auto& [key, communicator] : communicators_) {
    all.push_back(communicator);
  }
  return all;
}

RegistryCounters Registry::counters() const {
  ReaderLock lock(mutex_);
  return counters_;
}

Status Registry::MissingError(const CallSite& site) const {
  return FailedPrecondition(
      site.ToString(), " over axes ", site.attributes().axes,
      ": its communicator is closed or was never created in this process. "
      "Call jaxcomm.init(mesh, axes) with the mesh this program was compiled "
      "for, then run it again.");
}

}  // namespace jaxcomm
