// Buffers and windows. As unkind as the real thing: what is freed while registered is
// a mistake, which the trace notes.

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/communicator.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/group.h"
#include "tests/doubles/nccl/operation.h"
#include "tests/doubles/nccl/room.h"

namespace jaxcomm::fake {
namespace {

// Pretended, of the communicator's device.
constexpr int64_t kBytesOfOne = 64 << 10;
constexpr uintptr_t kWindowAlignment = 4096;

struct Registration {
  Communicator* communicator;
  uintptr_t start;
  size_t bytes;
};

struct Registrations {
  uintptr_t next = 0x20000000;
  std::map<uintptr_t, Registration> of;  // by handle
};

nccl::Result Add(Communicator& communicator, const void* data, size_t bytes,
                 uintptr_t* handle) {
  if (!Reserve(communicator.device, kBytesOfOne)) {
    return CudaFailure(cuda::kOutOfMemory);
  }
  {
    std::lock_guard<std::mutex> lock(communicator.mutex);
    communicator.bytes += kBytesOfOne;
  }
  Locked<Registrations> all;
  *handle = all->next++;
  all->of[*handle] = {&communicator, reinterpret_cast<uintptr_t>(data), bytes};
  return nccl::kSuccess;
}

nccl::Result Remove(nccl::Comm comm, const void* handle) {
  const auto communicator = Communicators().Find(comm);
  Locked<Registrations> all;
  const auto found = all->of.find(reinterpret_cast<uintptr_t>(handle));
  if (communicator == nullptr || found == all->of.end() ||
      found->second.communicator != communicator.get()) {
    return Failure(nccl::kInvalidArgument,
                   "No such communicator, or no such registration of it");
  }
  all->of.erase(found);
  Release(communicator->device, kBytesOfOne);
  std::lock_guard<std::mutex> also(communicator->mutex);
  communicator->bytes -= kBytesOfOne;
  return nccl::kSuccess;
}

// All ranks refuse if one must, or if the sizes differ.
nccl::Result RegisterWindow(Communicator& communicator, uint64_t meeting,
                            const void* data, size_t bytes, nccl::Window* window) {
  Posted mine{};
  mine.kind = kWindowRegister;
  mine.count = bytes;
  mine.op = reinterpret_cast<uintptr_t>(data) % kWindowAlignment == 0 && bytes > 0 &&
            IsWindowMemory(data, bytes);
  std::vector<Posted> all;
  const nccl::Result result = MeetOnHost(
      communicator.room.get(), communicator.rank, meeting, mine,
      [&] { return communicator.Stopped(); }, &all);
  if (result != nccl::kSuccess) return result;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].op == 0) {
      return Failure(nccl::kInvalidArgument,
                     "Window of rank " + std::to_string(rank) +
                         " is not aligned to 4096 bytes within an ncclMemAlloc");
    }
    if (all[rank].count != all[0].count) {
      return Failure(nccl::kInvalidArgument,
                     "Windows of rank 0 and rank " + std::to_string(rank) + " have " +
                         std::to_string(all[0].count) + " and " +
                         std::to_string(all[rank].count) + " bytes");
    }
  }
  uintptr_t handle = 0;
  const nccl::Result added = Add(communicator, data, bytes, &handle);
  if (added == nccl::kSuccess) *window = reinterpret_cast<nccl::Window>(handle);
  return added;
}

}  // namespace

void TraceIfRegistered(const void* data, size_t bytes) {
  const auto start = reinterpret_cast<uintptr_t>(data);
  Locked<Registrations> all;
  for (const auto& [handle, registration] : all->of) {
    if (registration.start >= start + bytes ||
        registration.start + registration.bytes <= start) {
      continue;
    }
    TraceEntry entry{"free"};
    entry.comm = registration.communicator->number;
    entry.violation = "freed while registered with the communicator";
    Trace(entry);
  }
}

void DropRegistrations(Communicator* communicator) {
  Locked<Registrations> all;
  for (auto entry = all->of.begin(); entry != all->of.end();) {
    entry = entry->second.communicator == communicator ? all->of.erase(entry)
                                                       : std::next(entry);
  }
}

}  // namespace jaxcomm::fake

namespace jaxcomm::nccl {

Result ncclCommRegister(Comm comm, void* data, size_t bytes, void** handle) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommRegister", fake::Number(comm), -1,
                    static_cast<int64_t>(bytes));
  JAXCOMM_FAKE_FIND(communicator, comm);
  if (data == nullptr || bytes == 0 || handle == nullptr) {
    return fake::Failure(kInvalidArgument, "ncclCommRegister: nothing to register");
  }
  uintptr_t number = 0;
  const Result added = fake::Add(*communicator, data, bytes, &number);
  if (added == kSuccess) *handle = reinterpret_cast<void*>(number);
  return added;
}

Result ncclCommDeregister(Comm comm, void* handle) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommDeregister", fake::Number(comm));
  return fake::Remove(comm, handle);
}

Result ncclCommWindowRegister(Comm comm, void* data, size_t bytes, Window* window,
                              int flags) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommWindowRegister", fake::Number(comm), -1,
                    static_cast<int64_t>(bytes), -1, flags, -1, fake::CurrentGroup());
  JAXCOMM_FAKE_FIND(communicator, comm);
  if (window == nullptr) {
    return fake::Spoil(fake::Failure(kInvalidArgument, "window is null"));
  }
  *window = nullptr;
  fake::Job job;
  job.run = [=, meeting = ++communicator->meetings] {
    return fake::RegisterWindow(*communicator, meeting, data, bytes, window);
  };
  return fake::Submit(std::move(job));
}

Result ncclCommWindowDeregister(Comm comm, Window window) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommWindowDeregister", fake::Number(comm));
  return fake::Remove(comm, window);
}

}  // namespace jaxcomm::nccl
