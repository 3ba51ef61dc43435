// Device memory that other ranks map: one arena for each GPU of this process, of which
// all communicators take regions.
//
// It grows by segments, up to a bound. A segment is exported once, and opened once by
// each other process, however many regions of it are used. It is freed with its last
// region.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_DEVICE_ARENA_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_DEVICE_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/library/library.h"
#include "ffi/base/status.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

class DeviceArena {
 public:
  // A segment has as many bytes at least.
  static constexpr size_t kLeastBytes = size_t{4} << 20;

  struct Region {
    cuda::Pointer at = 0;
    size_t bytes = 0;
    // What it is a part of, for other processes. A number names one segment for all
    // time: memory that is freed and allocated again may lie at the same address.
    uint64_t segment = 0, offset = 0;
    cuda::IpcHandle handle = {};
  };

  // That of a device, as CUDA numbers them. It holds the primary context while it has
  // memory there.
  static DeviceArena& Of(int ordinal);
  // The bytes of all arenas of this process: without what is unused by now, unless a
  // device is busy.
  static int64_t TotalBytes();

  // Takes a region. The arena does not grow beyond `most_bytes` for it. `library` must
  // outlive the region.
  ErrorOr<Region> Take(const NcclLibrary& library, size_t bytes, bool is_exported,
                       size_t most_bytes);
  // Gives a region back as soon as `is_unused` holds: now, or when one is taken or
  // given back later.
  void GiveBack(const NcclLibrary& library, const Region& region,
                std::function<bool()> is_unused);

 private:
  struct Segment {
    cuda::Device device = 0;
    cuda::Context context = nullptr;
    cuda::Pointer at = 0;
    size_t bytes = 0;
    uint64_t number = 0;
    bool is_exported = false;
    cuda::IpcHandle handle = {};
    std::map<size_t, size_t> taken;  // bytes by offset
  };
  struct Returned {
    const NcclLibrary* library = nullptr;
    Region region;
    std::function<bool()> is_unused;
  };

  explicit DeviceArena(int ordinal) : ordinal_(ordinal) {}

  static Region RegionOf(const Segment& segment, size_t offset, size_t bytes);
  // The offset of a gap, or the end of the segment.
  static size_t FindGap(const Segment& segment, size_t bytes);
  Status Export(const NcclLibrary& library, Segment& segment);
  ErrorOr<Segment*> Grow(const NcclLibrary& library, size_t bytes, size_t most_bytes)
      REQUIRES(mutex_);
  void Free(const NcclLibrary& library, const Region& region) REQUIRES(mutex_);
  void FreeUnused() REQUIRES(mutex_);

  const int ordinal_;
  Mutex mutex_;
  std::list<Segment> segments_ GUARDED_BY(mutex_);
  std::vector<Returned> returned_ GUARDED_BY(mutex_);
};

// Segments of other processes, mapped for a device of this one.
class OpenedSegments {
 public:
  // `process`: a number of the owner. Returns where it lies; the current context is the
  // device's.
  static ErrorOr<cuda::Pointer> Open(const NcclLibrary& library, cuda::Context context,
                                     uint64_t process, uint64_t segment,
                                     const cuda::IpcHandle& handle);
  // Undoes one Open().
  static void Close(const NcclLibrary& library, cuda::Pointer segment);
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_DEVICE_ARENA_H_
