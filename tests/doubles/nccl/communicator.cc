// What a communicator holds: its turn among those that share resources, and memory of
// its device, some of which it gives back while it is suspended.
#include "tests/doubles/nccl/communicator.h"

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/failed.h"

namespace jaxcomm::fake {
namespace {

constexpr int64_t kMiB = 1 << 20;
// Pretended: what a communicator with resources of its own takes from its device, and
// how much of that a suspended one keeps; and what one that shares its parent's takes.
constexpr int64_t kOwnBytes = 100 * kMiB;
constexpr int64_t kOwnPersistentBytes = 4 * kMiB;
constexpr int64_t kSharedBytes = 1 * kMiB;

}  // namespace

uint64_t Resources::TakeTicket() {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_++;
}

bool Resources::WaitForTurn(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!aborted_ && turn_ != ticket && DeviceFailure() == cuda::kSuccess) {
    // By the system's clock: ThreadSanitizer does not see waits by another.
    changed_.wait_until(lock, std::chrono::system_clock::now() + kLook);
  }
  return turn_ == ticket && !aborted_;
}

void Resources::EndTurn(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  turn_ = ticket + 1;
  changed_.notify_all();
}

void Resources::Abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  changed_.notify_all();
}

void Resources::Count(const Bytes& more) {
  std::lock_guard<std::mutex> lock(mutex_);
  bytes_.suspendable += more.suspendable;
  bytes_.persistent += more.persistent;
  bytes_.members += more.members;
}

Resources::Bytes Resources::bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

void Communicator::SetState(nccl::Result result, const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  state = result;
  error = result == nccl::kSuccess ? "" : text;
}

nccl::Result Communicator::Occupy() {
  const int64_t bytes = shares ? kSharedBytes : kOwnBytes;
  if (!Reserve(device, bytes)) return CudaFailure(cuda::kOutOfMemory);
  std::lock_guard<std::mutex> lock(mutex);
  persistent_bytes = shares ? kSharedBytes : kOwnPersistentBytes;
  suspendable_bytes = bytes - persistent_bytes;
  resources->Count({suspendable_bytes, persistent_bytes, 1});
  return nccl::kSuccess;
}

void Communicator::Vacate() {
  std::lock_guard<std::mutex> lock(mutex);
  if (persistent_bytes == 0) return;  // never took any
  Release(device, persistent_bytes + (suspended ? 0 : suspendable_bytes));
  resources->Count({-suspendable_bytes, -persistent_bytes, -1});
  persistent_bytes = suspendable_bytes = 0;
}

Handles<nccl::Comm, Communicator>& Communicators() {
  static auto& communicators = *new Handles<nccl::Comm, Communicator>(1);
  return communicators;
}

namespace {
const OpenKind kOpen("communicators", [] { return Communicators().size(); });
}  // namespace

nccl::Result AsyncError(Communicator* communicator, std::string* text) {
  {
    std::lock_guard<std::mutex> lock(communicator->mutex);
    if (communicator->state != nccl::kSuccess) {
      *text = communicator->error;
      return communicator->state;
    }
  }
  // NCCL does not tell that one which shares its resources was aborted (2.30.7).
  Room::Lock lock(*communicator->room);
  *text = communicator->room->board().failure_text;
  return static_cast<nccl::Result>(communicator->room->board().failure);
}

nccl::Result FindReady(nccl::Comm comm, std::shared_ptr<Communicator>* communicator) {
  *communicator = Communicators().Find(comm);
  if (*communicator == nullptr) {
    return Failure(nccl::kInvalidArgument, "No such communicator, or it was destroyed");
  }
  std::string text;
  const nccl::Result result = AsyncError(communicator->get(), &text);
  if (result == nccl::kInProgress) {
    return Failure(nccl::kInvalidArgument,
                   "Attempt to use communicator before the previous operation returned "
                   "ncclSuccess");
  }
  if (result != nccl::kSuccess) return Failure(result, text);
  if ((*communicator)->finalized) {
    return Failure(nccl::kInvalidUsage, "The communicator was finalized");
  }
  return nccl::kSuccess;
}

}  // namespace jaxcomm::fake

namespace jaxcomm::nccl {

Result ncclCommSuspend(Comm comm, int flags) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommSuspend", fake::Number(comm));
  JAXCOMM_FAKE_FIND(communicator, comm);
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
  JAXCOMM_FAKE_FIND(communicator, comm);
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
  JAXCOMM_FAKE_FIND(communicator, comm);
  if (value == nullptr) return fake::Failure(kInvalidArgument, "value is null");
  std::lock_guard<std::mutex> lock(communicator->mutex);
  const fake::Resources::Bytes bytes = communicator->resources->bytes();
  // Nothing asks for the others.
  if (stat == MemStat::kPersist || stat == MemStat::kTotal) {
    *value = static_cast<uint64_t>(bytes.persistent +
                                   (stat == MemStat::kTotal ? bytes.suspendable : 0));
    return kSuccess;
  }
  return fake::Failure(kInvalidArgument, "ncclCommMemStats: unknown statistic");
}

}  // namespace jaxcomm::nccl
