// Memory that other GPUs can reach directly: of ncclMemAlloc, and registered with the
// communicators that use it.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_SYMMETRIC_MEMORY_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_SYMMETRIC_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/nccl/library/library.h"
#include "ffi/base/status.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

class NcclEngine;

// One segment of equal size on each device of this process. Symmetric kernels want an
// array at the same offset on every rank, also on those of other processes: blocks are
// taken in one order and given back all at once, since processes lose arrays at
// different times.
class SymmetricMemory : public std::enable_shared_from_this<SymmetricMemory> {
 public:
  // Ordinals: of the local devices.
  static ErrorOr<std::shared_ptr<SymmetricMemory>> Create(
      const NcclLibrary& library, const std::vector<int>& ordinals, int64_t bytes);
  // Deregisters it first.
  ~SymmetricMemory();

  // Unique in this process for all time: memory that is freed and allocated again is
  // another segment at the same address.
  uint64_t segment() const { return segment_; }
  int64_t bytes() const { return bytes_; }
  int64_t used_bytes() const { return used_.load(); }
  int64_t blocks() const { return blocks_.load(); }
  // Null if the device has none.
  void* data(int ordinal) const;

  // The offset of a new block of this many bytes, the same on every device.
  ErrorOr<int64_t> Take(int64_t bytes);
  // Fails while somebody holds a block.
  Status Reset();
  // To be called for each device's part of a block, when it is handed out and when it
  // is gone.
  void Hold() { blocks_.fetch_add(1); }
  void LetGo() { blocks_.fetch_sub(1); }

  // Copies to a block from other memory of the device, zeros if that is null, and
  // waits.
  Status Fill(int ordinal, int64_t offset, const void* from, int64_t bytes);

  // Has it deregistered from an engine before it is freed.
  void AddRegistrar(std::weak_ptr<NcclEngine> registrar);
  // Frees it; fails while somebody holds a block.
  Status Close();

 private:
  struct Part {
    int ordinal = 0;
    cuda::Context context = nullptr;
    void* data = nullptr;
  };

  SymmetricMemory(const NcclLibrary& library, int64_t bytes);
  void Free();

  const NcclLibrary& library_;
  const uint64_t segment_;
  const int64_t bytes_;
  std::vector<Part> parts_;
  std::atomic<int64_t> used_{0};
  std::atomic<int64_t> blocks_{0};
  Mutex mutex_;
  std::vector<std::weak_ptr<NcclEngine>> registrars_ GUARDED_BY(mutex_);
};

// The segments that one rank's communicator has registered. Not thread-safe.
class Windows {
 public:
  // Begins to register a segment, in a group of NCCL's with the other local ranks.
  Status Begin(const NcclLibrary& library, nccl::Comm comm, void* data, int64_t bytes,
               uint64_t segment);
  // Ends it, once the group has ended: "window" for NCCL's symmetric memory, "buffer"
  // and why where ncclCommRegister had to do, or why the memory is not registered.
  std::string Finish(const NcclLibrary& library, nccl::Comm comm, uint64_t segment,
                     const Status& ended);
  // How a segment is registered; null if it is not.
  const std::string* How(uint64_t segment) const;

  // Whether all the bytes are in one registered segment.
  bool Cover(const void* data, int64_t bytes) const {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    for (const auto& entry : entries_) {
      if (entry->begin <= begin &&
          begin + static_cast<uintptr_t>(bytes) <= entry->end) {
        return entry->window != nullptr || entry->handle != nullptr;
      }
    }
    return false;
  }
  bool empty() const { return entries_.empty(); }

  void Remove(const NcclLibrary& library, nccl::Comm comm, uint64_t segment);
  void RemoveAll(const NcclLibrary& library, nccl::Comm comm);

 private:
  struct Entry {
    uint64_t segment = 0;
    uintptr_t begin = 0, end = 0;
    nccl::Window window = nullptr;
    void* handle = nullptr;
    std::string how;
  };

  void Release(const NcclLibrary& library, nccl::Comm comm, const Entry& entry);

  // NCCL writes a window into its entry: none moves.
  std::vector<std::unique_ptr<Entry>> entries_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_SYMMETRIC_MEMORY_H_
