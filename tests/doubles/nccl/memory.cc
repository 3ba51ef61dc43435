// Device memory: host memory, of which other processes can open what is large.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/communicator.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/failed.h"
#include "tests/doubles/nccl/settings.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {
namespace {

// What is at least as large is memory of its own, which other processes can open.
constexpr size_t kShareableBytes = size_t{2} << 20;

struct Allocation {
  int device;
  size_t bytes;
  bool by_nccl;
  int file = -1;  // of what can be shared
};

// What a cuda::IpcHandle holds.
struct Shareable {
  pid_t process;
  int file;
  size_t bytes;
};

struct Opened {
  size_t bytes;
  int file;
};

struct Memory {
  std::map<int, int64_t> used;                  // of each device
  std::map<uintptr_t, Allocation> allocations;  // by address
  std::map<uintptr_t, Opened> opened;           // memory of other processes
  std::map<uintptr_t, size_t> of_host;
};

const OpenKind kOpenOnDevice("device memory",
                             [] { return Locked<Memory>()->allocations.size(); });
const OpenKind kOpenOnHost("host memory",
                           [] { return Locked<Memory>()->of_host.size(); });
const OpenKind kOpenOfOthers("memory of others",
                             [] { return Locked<Memory>()->opened.size(); });

void* Allocate(int device, size_t bytes, bool by_nccl) {
  if (!Reserve(device, static_cast<int64_t>(bytes))) return nullptr;
  int file = -1;
  // What windows ask for; cuMemAlloc gives 256.
  constexpr size_t kAlignment = 4096;
  void* data = nullptr;
  if (!by_nccl && bytes >= kShareableBytes) {
    file = memfd_create("jaxcomm-fake", MFD_CLOEXEC);
    data = file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0
               ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
               : MAP_FAILED;
    if (data == MAP_FAILED) data = nullptr;
  } else {
    data = std::aligned_alloc(kAlignment,
                              (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  if (data == nullptr) {
    if (file >= 0) close(file);
    Release(device, static_cast<int64_t>(bytes));
    return nullptr;
  }
  Locked<Memory> memory;
  memory->allocations[reinterpret_cast<uintptr_t>(data)] = {device, bytes, by_nccl,
                                                            file};
  return data;
}

// False: not an allocation of this kind.
bool Free(uintptr_t address, bool by_nccl) {
  size_t bytes = 0;
  int file = -1;
  {
    Locked<Memory> memory;
    const auto found = memory->allocations.find(address);
    if (found == memory->allocations.end() || found->second.by_nccl != by_nccl) {
      Misuse("memory that is none, or none any more");
      return false;
    }
    bytes = found->second.bytes;
    file = found->second.file;
    memory->used[found->second.device] -= static_cast<int64_t>(bytes);
    memory->allocations.erase(found);
  }
  void* const data = reinterpret_cast<void*>(address);
  TraceIfRegistered(data, bytes);
  if (file < 0) {
    std::free(data);
  } else {
    munmap(data, bytes);
    // Whoever has it mapped dies when it touches it.
    (void)!ftruncate(file, 0);
    close(file);
  }
  return true;
}

}  // namespace

bool Reserve(int device, int64_t bytes) {
  Locked<Memory> memory;
  if (memory->used[device] + bytes > kDeviceBytes) return false;
  memory->used[device] += bytes;
  return true;
}

void Release(int device, int64_t bytes) { Locked<Memory>()->used[device] -= bytes; }

bool IsWindowMemory(const void* data, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  Locked<Memory> memory;
  auto after = memory->allocations.upper_bound(address);
  if (after == memory->allocations.begin()) return false;
  const auto& [start, allocation] = *--after;
  return allocation.by_nccl && address + bytes <= start + allocation.bytes;
}

}  // namespace jaxcomm::fake

namespace jaxcomm::nccl {

Result ncclMemAlloc(void** data, size_t bytes) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclMemAlloc", 0, -1, static_cast<int64_t>(bytes));
  if (data == nullptr || bytes == 0) {
    return fake::Failure(kInvalidArgument, "ncclMemAlloc: no pointer or no bytes");
  }
  *data = fake::Allocate(fake::RuntimeDevice(), bytes, /*by_nccl=*/true);
  return *data == nullptr ? fake::CudaFailure(cuda::kOutOfMemory) : kSuccess;
}

Result ncclMemFree(void* data) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclMemFree");
  if (data == nullptr) return kSuccess;
  if (!fake::Free(reinterpret_cast<uintptr_t>(data), /*by_nccl=*/true)) {
    return fake::Failure(kInvalidArgument, "ncclMemFree: not from ncclMemAlloc");
  }
  return kSuccess;
}

}  // namespace jaxcomm::nccl

namespace jaxcomm::cuda {

Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuMemGetInfo_v2");
  const int device = fake::CurrentDevice();
  if (device == fake::kNoDevice) return kInvalidContext;
  fake::Locked<fake::Memory> memory;
  *total = static_cast<size_t>(fake::kDeviceBytes);
  *free = *total - static_cast<size_t>(memory->used[device]);
  return kSuccess;
}

Result cuMemAlloc_v2(Pointer* pointer, size_t bytes) {
  JAXCOMM_FAKE_CALL(kForbidden, "cuMemAlloc_v2", 0, -1, static_cast<int64_t>(bytes));
  const int device = fake::CurrentDevice();
  if (device == fake::kNoDevice) return kInvalidContext;
  if (bytes == 0) return kInvalidValue;
  void* const data = fake::Allocate(device, bytes, /*by_nccl=*/false);
  if (data == nullptr) return kOutOfMemory;
  *pointer = reinterpret_cast<uintptr_t>(data);
  return kSuccess;
}

Result cuMemFree_v2(Pointer pointer) {
  JAXCOMM_FAKE_CALL(kForbidden, "cuMemFree_v2");
  if (pointer == 0) return kSuccess;
  fake::WaitForDevice(fake::CurrentDevice());
  return fake::Free(pointer, /*by_nccl=*/false) ? kSuccess : kInvalidValue;
}

Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Stream stream) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuMemcpyDtoDAsync_v2", 0, fake::Number(stream),
                    static_cast<int64_t>(bytes));
  JAXCOMM_FAKE_STREAM(found, stream);
  found->Enqueue([to, from, bytes] {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from),
                 bytes);
  });
  return kSuccess;
}

Result cuMemcpy2DAsync_v2(const Rows* rows, Stream stream) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuMemcpy2DAsync_v2", 0, fake::Number(stream),
                    static_cast<int64_t>(rows->row_bytes * rows->rows));
  JAXCOMM_FAKE_STREAM(found, stream);
  if (rows->from_kind != Rows::kDevice || rows->to_kind != Rows::kDevice ||
      rows->from_pitch < rows->row_bytes || rows->to_pitch < rows->row_bytes ||
      std::max(rows->from_pitch, rows->to_pitch) >= size_t{1} << 31) {
    return kInvalidValue;
  }
  found->Enqueue([copied = *rows] {
    for (size_t row = 0; row < copied.rows; ++row) {
      std::memmove(reinterpret_cast<void*>(copied.to + row * copied.to_pitch),
                   reinterpret_cast<const void*>(copied.from + row * copied.from_pitch),
                   copied.row_bytes);
    }
  });
  return kSuccess;
}

Result cuMemsetD8Async(Pointer to, unsigned char value, size_t bytes, Stream stream) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuMemsetD8Async", 0, fake::Number(stream),
                    static_cast<int64_t>(bytes));
  JAXCOMM_FAKE_STREAM(found, stream);
  found->Enqueue(
      [to, value, bytes] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
  return kSuccess;
}

Result cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t bytes, Stream stream) {
  return cuMemcpyDtoDAsync_v2(to, reinterpret_cast<Pointer>(from), bytes, stream);
}

Result cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t bytes, Stream stream) {
  return cuMemcpyDtoDAsync_v2(reinterpret_cast<Pointer>(to), from, bytes, stream);
}

Result cuIpcGetMemHandle(IpcHandle* handle, Pointer pointer) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuIpcGetMemHandle");
  fake::Locked<fake::Memory> memory;
  const auto found = memory->allocations.find(pointer);
  if (found == memory->allocations.end() || found->second.file < 0) {
    return kInvalidValue;
  }
  const fake::Shareable shared{getpid(), found->second.file, found->second.bytes};
  static_assert(sizeof(shared) <= sizeof(*handle));
  std::memcpy(handle, &shared, sizeof(shared));
  return kSuccess;
}

Result cuIpcOpenMemHandle_v2(Pointer* pointer, IpcHandle handle, unsigned) {
  JAXCOMM_FAKE_CALL(kForbidden, "cuIpcOpenMemHandle_v2");
  fake::Shareable shared;
  std::memcpy(&shared, &handle, sizeof(shared));
  // As in CUDA.
  if (shared.process == getpid()) return kInvalidContext;
  const std::string path =
      "/proc/" + std::to_string(shared.process) + "/fd/" + std::to_string(shared.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return kInvalidValue;
  void* const data =
      mmap(nullptr, shared.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) {
    close(file);
    return kOutOfMemory;
  }
  fake::Locked<fake::Memory> memory;
  *pointer = reinterpret_cast<uintptr_t>(data);
  memory->opened[*pointer] = {shared.bytes, file};
  return kSuccess;
}

Result cuIpcCloseMemHandle(Pointer pointer) {
  JAXCOMM_FAKE_CALL(kForbidden, "cuIpcCloseMemHandle");
  fake::Locked<fake::Memory> memory;
  const auto found = memory->opened.find(pointer);
  if (found == memory->opened.end()) {
    fake::Misuse("memory that is none, or none any more");
    return kInvalidValue;
  }
  const auto [bytes, file] = found->second;
  struct stat info;
  if (fstat(file, &info) != 0 || info.st_size == 0) {
    fake::Misuse("memory that another process has freed while it was open here");
  }
  munmap(reinterpret_cast<void*>(pointer), bytes);
  close(file);
  memory->opened.erase(found);
  return kSuccess;
}

Result cuMemAllocHost_v2(void** data, size_t bytes) {
  JAXCOMM_FAKE_CALL(kForbidden, "cuMemAllocHost_v2", 0, -1,
                    static_cast<int64_t>(bytes));
  if (fake::CurrentDevice() == fake::kNoDevice) return kInvalidContext;
  *data = std::calloc(1, bytes);
  if (*data == nullptr) return kOutOfMemory;
  fake::Locked<fake::Memory>()->of_host[reinterpret_cast<uintptr_t>(*data)] = bytes;
  return kSuccess;
}

Result cuMemFreeHost(void* data) {
  JAXCOMM_FAKE_CALL(kForbidden, "cuMemFreeHost");
  fake::WaitForDevice(fake::CurrentDevice());
  if (fake::Locked<fake::Memory>()->of_host.erase(reinterpret_cast<uintptr_t>(data)) ==
      0) {
    fake::Misuse("memory that is none, or none any more");
    return kInvalidValue;
  }
  std::free(data);
  return kSuccess;
}

}  // namespace jaxcomm::cuda
