#include "ffi/backends/nccl/engines/device_arena.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <tuple>

#include "ffi/backends/nccl/failure/process_failure.h"

namespace jaxcomm {
namespace {

std::atomic<uint64_t> next_segment{1};
std::atomic<int64_t> total_bytes{0};

// Regions do not share a page of the GPU. CUDA gives memory by larger ones.
constexpr size_t kRegionBytes = size_t{64} << 10;
constexpr size_t kSegmentBytes = size_t{2} << 20;

size_t RoundedUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

Mutex arenas_mutex;
// Never destroyed, as below: communicators may end after static objects.
std::map<int, std::unique_ptr<DeviceArena>>& AllArenas() REQUIRES(arenas_mutex) {
  static auto& all = *new std::map<int, std::unique_ptr<DeviceArena>>;
  return all;
}

struct Opened {
  cuda::Pointer at = 0;
  int users = 0;
};
using OpenedName = std::tuple<cuda::Context, uint64_t, uint64_t>;

Mutex opened_mutex;
std::map<OpenedName, Opened>& AllOpened() REQUIRES(opened_mutex) {
  static auto& all = *new std::map<OpenedName, Opened>;
  return all;
}

}  // namespace

DeviceArena& DeviceArena::Of(int ordinal) {
  MutexLock lock(arenas_mutex);
  std::unique_ptr<DeviceArena>& arena = AllArenas()[ordinal];
  if (arena == nullptr) arena.reset(new DeviceArena(ordinal));
  return *arena;
}

int64_t DeviceArena::TotalBytes() {
  // CUDA frees memory once a device is idle.
  if (ProcessFailure::Get().IsAnyBusy()) return total_bytes;
  MutexLock lock(arenas_mutex);
  for (const auto& [ordinal, arena] : AllArenas()) {
    MutexLock arena_lock(arena->mutex_);
    arena->FreeUnused();
  }
  return total_bytes;
}

DeviceArena::Region DeviceArena::RegionOf(const Segment& segment, size_t offset,
                                          size_t bytes) {
  return {segment.at + offset, bytes, segment.number, offset, segment.handle};
}

size_t DeviceArena::FindGap(const Segment& segment, size_t bytes) {
  size_t end = 0;
  for (const auto& [offset, taken] : segment.taken) {
    if (offset - end >= bytes) return end;
    end = offset + taken;
  }
  return segment.bytes - end >= bytes ? end : segment.bytes;
}

ErrorOr<DeviceArena::Region> DeviceArena::Take(const NcclLibrary& library, size_t bytes,
                                               bool is_exported, size_t most_bytes) {
  MutexLock lock(mutex_);
  FreeUnused();
  bytes = RoundedUp(bytes, kRegionBytes);
  Segment* found = nullptr;
  for (Segment& segment : segments_) {
    if (found == nullptr && FindGap(segment, bytes) < segment.bytes) found = &segment;
  }
  if (found == nullptr) {
    ASSIGN_OR_RETURN(found, Grow(library, bytes, most_bytes));
  }
  const size_t offset = FindGap(*found, bytes);
  found->taken[offset] = bytes;
  if (is_exported && !found->is_exported) {
    if (Status exported = Export(library, *found); exported.failure()) {
      Free(library, RegionOf(*found, offset, bytes));
      return exported;
    }
  }
  return RegionOf(*found, offset, bytes);
}

Status DeviceArena::Export(const NcclLibrary& library, Segment& segment) {
  CurrentContext current(library.cuda, segment.context);
  RETURN_IF_ERROR(
      library.Try(library.cuda.IpcGetMemHandle, &segment.handle, segment.at));
  segment.is_exported = true;
  return OkStatus();
}

ErrorOr<DeviceArena::Segment*> DeviceArena::Grow(const NcclLibrary& library,
                                                 size_t bytes, size_t most_bytes) {
  size_t held = 0;
  for (const Segment& segment : segments_) held += segment.bytes;
  bytes = RoundedUp(std::max(bytes, kLeastBytes), kSegmentBytes);
  if (held + bytes > most_bytes) {
    return Status(ErrorCode::kResourceExhausted,
                  StrCat("memory for peers has ", held >> 20, " MiB on this GPU, and ",
                         bytes >> 20, " more exceed the bound of ", most_bytes >> 20,
                         " (CommPolicy(arena_bytes=))"));
  }
  Segment segment;
  segment.bytes = bytes;
  segment.number = next_segment.fetch_add(1);
  RETURN_IF_ERROR(library.Try(library.cuda.DeviceGet, &segment.device, ordinal_));
  RETURN_IF_ERROR(library.Try(library.cuda.DevicePrimaryCtxRetain, &segment.context,
                              segment.device));
  CurrentContext current(library.cuda, segment.context);
  const Status made = library.Try(library.cuda.MemAlloc, &segment.at, bytes);
  if (made.failure()) {
    library.cuda.DevicePrimaryCtxRelease(segment.device);
    return made;
  }
  total_bytes += static_cast<int64_t>(bytes);
  segments_.push_back(segment);
  return &segments_.back();
}

void DeviceArena::GiveBack(const NcclLibrary& library, const Region& region,
                           std::function<bool()> is_unused) {
  MutexLock lock(mutex_);
  returned_.push_back({&library, region, std::move(is_unused)});
  FreeUnused();
}

void DeviceArena::FreeUnused() {
  std::vector<Returned> still;
  for (Returned& each : std::exchange(returned_, {})) {
    if (each.is_unused()) {
      Free(*each.library, each.region);
    } else {
      still.push_back(std::move(each));
    }
  }
  returned_ = std::move(still);
}

void DeviceArena::Free(const NcclLibrary& library, const Region& region) {
  const auto found = std::find_if(
      segments_.begin(), segments_.end(),
      [&](const Segment& segment) { return segment.number == region.segment; });
  found->taken.erase(region.offset);
  if (!found->taken.empty()) return;
  {
    CurrentContext current(library.cuda, found->context);
    library.cuda.MemFree(found->at);
  }
  library.cuda.DevicePrimaryCtxRelease(found->device);
  total_bytes -= static_cast<int64_t>(found->bytes);
  segments_.erase(found);
}

ErrorOr<cuda::Pointer> OpenedSegments::Open(const NcclLibrary& library,
                                            cuda::Context context, uint64_t process,
                                            uint64_t segment,
                                            const cuda::IpcHandle& handle) {
  MutexLock lock(opened_mutex);
  const OpenedName name{context, process, segment};
  const auto found = AllOpened().find(name);
  if (found != AllOpened().end()) {
    ++found->second.users;
    return found->second.at;
  }
  cuda::Pointer at = 0;
  RETURN_IF_ERROR(library.Try(library.cuda.IpcOpenMemHandle, &at, handle,
                              cuda::kIpcEnablePeerAccess));
  AllOpened()[name] = {at, 1};
  return at;
}

void OpenedSegments::Close(const NcclLibrary& library, cuda::Pointer segment) {
  MutexLock lock(opened_mutex);
  auto& all = AllOpened();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& each) {
    return each.second.at == segment;
  });
  if (--found->second.users > 0) return;
  all.erase(found);
  library.cuda.IpcCloseMemHandle(segment);
}

}  // namespace jaxcomm
