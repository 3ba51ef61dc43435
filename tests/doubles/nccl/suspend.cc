// Giving a communicator's memory back for a while, and saying how much it holds.
#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/communicator.h"
#include "tests/doubles/nccl/memory.h"

namespace jaxcomm::nccl {

Result ncclCommSuspend(Comm comm, int flags) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommSuspend", fake::Number(comm));
  std::shared_ptr<fake::Communicator> communicator;
  const Result result = fake::FindReady(comm, &communicator);
  if (result != kSuccess) return result;
  if (flags != kSuspendMemory) {
    return fake::Failure(kInvalidArgument, "ncclCommSuspend: unknown flags");
  }
  if (communicator->resources->bytes().members > 1) {
    return fake::Failure(kInvalidUsage,
                         "ncclCommSuspend: not supported with split_share");
  }
  std::lock_guard<std::mutex> lock(communicator->mutex);
  if (communicator->suspended || communicator->outstanding != 0) {
    return fake::Failure(kInvalidUsage,
                         "ncclCommSuspend: suspended already, or in use");
  }
  communicator->suspended = true;
  fake::Release(communicator->device, communicator->suspendable_bytes);
  return kSuccess;
}

Result ncclCommResume(Comm comm) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommResume", fake::Number(comm));
  std::shared_ptr<fake::Communicator> communicator;
  const Result result = fake::FindReady(comm, &communicator);
  if (result != kSuccess) return result;
  std::lock_guard<std::mutex> lock(communicator->mutex);
  if (!communicator->suspended) {
    return fake::Failure(kInvalidUsage, "ncclCommResume: not suspended");
  }
  if (!fake::Reserve(communicator->device, communicator->suspendable_bytes)) {
    return fake::CudaFailure(cuda::kOutOfMemory);
  }
  communicator->suspended = false;
  return kSuccess;
}

Result ncclCommMemStats(Comm comm, MemStat stat, uint64_t* value) {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclCommMemStats", fake::Number(comm));
  std::shared_ptr<fake::Communicator> communicator;
  const Result result = fake::FindReady(comm, &communicator);
  if (result != kSuccess) return result;
  if (value == nullptr) return fake::Failure(kInvalidArgument, "value is null");
  std::lock_guard<std::mutex> lock(communicator->mutex);
  const fake::Resources::Bytes bytes = communicator->resources->bytes();
  const auto suspendable = static_cast<uint64_t>(bytes.suspendable);
  const auto persistent = static_cast<uint64_t>(bytes.persistent);
  switch (stat) {
    case MemStat::kSuspend:
      *value = suspendable;
      return kSuccess;
    case MemStat::kSuspended:
      *value = communicator->suspended ? 1 : 0;
      return kSuccess;
    case MemStat::kPersist:
      *value = persistent;
      return kSuccess;
    case MemStat::kTotal:
      *value = suspendable + persistent;
      return kSuccess;
  }
  return fake::Failure(kInvalidArgument, "ncclCommMemStats: unknown statistic");
}

}  // namespace jaxcomm::nccl
