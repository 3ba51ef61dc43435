#include "ffi/backends/nccl/engines/symmetric_memory.h"

#include <utility>

#include "ffi/backends/nccl/engines/nccl_engine.h"
#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/base/keep_forever.h"
#include "ffi/os/forked.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {
namespace {

// The alignment of CUDA's own allocator.
constexpr int64_t kAlignment = 512;

std::atomic<uint64_t> next_segment{1};

}  // namespace

SymmetricMemory::SymmetricMemory(const NcclLibrary& library, int64_t bytes)
    : library_(library), segment_(next_segment.fetch_add(1)), bytes_(bytes) {}

ErrorOr<std::shared_ptr<SymmetricMemory>> SymmetricMemory::Create(
    const NcclLibrary& library, const std::vector<int>& ordinals, int64_t bytes) {
  if (library.nccl.MemAlloc == nullptr || library.nccl.MemFree == nullptr) {
    return FailedPrecondition("NCCL ", library.VersionText(),
                              " has no ncclMemAlloc; 2.19 and newer have");
  }
  std::shared_ptr<SymmetricMemory> made(new SymmetricMemory(library, bytes));
  for (const int ordinal : ordinals) {
    cuda::Device device = 0;
    Part part;
    part.ordinal = ordinal;
    RETURN_IF_ERROR(library.Try(library.cuda.DeviceGet, &device, ordinal));
    RETURN_IF_ERROR(
        library.Try(library.cuda.DevicePrimaryCtxRetain, &part.context, device));
    CurrentContext current(library.cuda, part.context);
    const Status status =
        library.Try(library.nccl.MemAlloc, &part.data, static_cast<size_t>(bytes));
    made->parts_.push_back(part);
    if (status.failure()) {
      size_t free = 0, total = 0;
      library.cuda.MemGetInfo(&free, &total);
      return Status(
          ErrorCode::kResourceExhausted,
          StrCat(status.message(), ". ", bytes, " bytes were asked for on device ",
                 ordinal, ", which has ", free, " free"));
    }
  }
  return made;
}

SymmetricMemory::~SymmetricMemory() { Free(); }

void SymmetricMemory::Free() {
  if (IsForked()) return;
  std::vector<std::weak_ptr<NcclEngine>> registrars;
  {
    MutexLock lock(mutex_);
    registrars.swap(registrars_);
  }
  for (const auto& each : registrars) {
    if (const auto registrar = each.lock()) registrar->Deregister(segment_);
  }
  for (const Part& part : std::exchange(parts_, {})) {
    CurrentContext current(library_.cuda, part.context);
    if (part.data != nullptr && !DevicesAreStopped()) {
      library_.nccl.MemFree(part.data);
    }
    cuda::Device device = 0;
    library_.cuda.DeviceGet(&device, part.ordinal);
    library_.cuda.DevicePrimaryCtxRelease(device);
  }
}

void* SymmetricMemory::data(int ordinal) const {
  for (const Part& part : parts_) {
    if (part.ordinal == ordinal) return part.data;
  }
  return nullptr;
}

ErrorOr<int64_t> SymmetricMemory::Take(int64_t bytes) {
  if (bytes < 0) return InvalidArgument(bytes, " bytes were asked for");
  MutexLock lock(mutex_);
  const int64_t taken = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (taken > bytes_ - used_) {
    return Status(ErrorCode::kResourceExhausted,
                  StrCat(bytes, " bytes a device were asked for, and ", bytes_ - used_,
                         " of ", bytes_, " are left"));
  }
  return used_.fetch_add(taken);
}

Status SymmetricMemory::Reset() {
  MutexLock lock(mutex_);
  if (blocks() > 0) {
    return FailedPrecondition(blocks(), " arrays still lie in it");
  }
  used_ = 0;
  return OkStatus();
}

Status SymmetricMemory::Fill(int ordinal, int64_t offset, const void* from,
                             int64_t bytes) {
  for (const Part& part : parts_) {
    if (part.ordinal != ordinal) continue;
    CurrentContext current(library_.cuda, part.context);
    const auto to =
        reinterpret_cast<cuda::Pointer>(part.data) + static_cast<cuda::Pointer>(offset);
    const auto count = static_cast<size_t>(bytes);
    const cuda::Result given =
        from == nullptr
            ? library_.cuda.MemsetD8Async(to, 0, count, nullptr)
            : library_.cuda.MemcpyDtoDAsync(to, reinterpret_cast<cuda::Pointer>(from),
                                            count, nullptr);
    RETURN_IF_ERROR(library_.Check(given, "copying to symmetric memory"));
    return library_.Check(library_.cuda.StreamSynchronize(nullptr),
                          "copying to symmetric memory");
  }
  return InvalidArgument("device ", ordinal, " has no part of this symmetric memory");
}

void SymmetricMemory::AddRegistrar(std::weak_ptr<NcclEngine> registrar) {
  MutexLock lock(mutex_);
  registrars_.push_back(std::move(registrar));
}

Status SymmetricMemory::Close() {
  if (blocks() > 0) {
    return FailedPrecondition(blocks(), " arrays still lie in it");
  }
  Free();
  return OkStatus();
}

Status Windows::Begin(const NcclLibrary& library, nccl::Comm comm, void* data,
                      int64_t bytes, uint64_t segment) {
  Entry& entry = *entries_.emplace_back(std::make_unique<Entry>());
  entry.segment = segment;
  entry.begin = reinterpret_cast<uintptr_t>(data);
  entry.end = entry.begin + static_cast<uintptr_t>(bytes);
  if (library.nccl.CommWindowRegister == nullptr) return OkStatus();
  // NCCL fills in the window when the group ends.
  return library.Check(
      library.nccl.CommWindowRegister(comm, data, static_cast<size_t>(bytes),
                                      &entry.window, nccl::kWindowSymmetric),
      "ncclCommWindowRegister");
}

std::string Windows::Finish(const NcclLibrary& library, nccl::Comm comm,
                            uint64_t segment, const Status& ended) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i]->segment != segment) continue;
    if (ended.failure()) {
      // NCCL may still write to it, if the time was up.
      auto anew = std::make_unique<Entry>();
      anew->segment = segment;
      anew->begin = entries_[i]->begin;
      anew->end = entries_[i]->end;
      std::swap(entries_[i], anew);
      KeepForever(std::move(anew));
    }
    Entry& entry = *entries_[i];
    if (entry.window != nullptr) return entry.how = "window";
    std::string why = ended.failure() ? std::string(ended.message())
                      : library.nccl.CommWindowRegister == nullptr
                          ? StrCat("NCCL ", library.VersionText(), " has no windows")
                          : "NCCL gave no window";
    if (library.nccl.CommRegister != nullptr) {
      const Status status = library.Check(
          library.nccl.CommRegister(comm, reinterpret_cast<void*>(entry.begin),
                                    entry.end - entry.begin, &entry.handle),
          "ncclCommRegister");
      if (status.success() && entry.handle != nullptr) {
        return entry.how = StrCat("buffer: ", why);
      }
      if (status.failure()) why += StrCat("; ", status.message());
    }
    entries_.erase(entries_.begin() + static_cast<ptrdiff_t>(i));
    return why;
  }
  return "";
}

const std::string* Windows::How(uint64_t segment) const {
  for (const auto& entry : entries_) {
    if (entry->segment == segment) return &entry->how;
  }
  return nullptr;
}

void Windows::Release(const NcclLibrary& library, nccl::Comm comm, const Entry& entry) {
  if (comm == nullptr) return;  // which ended, and its windows with it
  if (entry.window != nullptr) {
    library.nccl.CommWindowDeregister(comm, entry.window);
  }
  if (entry.handle != nullptr) library.nccl.CommDeregister(comm, entry.handle);
}

void Windows::Remove(const NcclLibrary& library, nccl::Comm comm, uint64_t segment) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i]->segment != segment) continue;
    Release(library, comm, *entries_[i]);
    entries_.erase(entries_.begin() + static_cast<ptrdiff_t>(i));
    return;
  }
}

void Windows::RemoveAll(const NcclLibrary& library, nccl::Comm comm) {
  for (const auto& entry : entries_) Release(library, comm, *entry);
  entries_.clear();
}

}  // namespace jaxcomm
