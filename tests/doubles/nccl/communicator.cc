// What a communicator holds: its turn among those that share resources, and memory of
// its device.
#include "tests/doubles/nccl/communicator.h"

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/failed.h"

namespace jaxcomm::fake {
namespace {

constexpr int64_t kMiB = 1 << 20;
// Pretended: what a communicator with resources of its own takes from its device, and
// what one that shares its parent's takes.
constexpr int64_t kOwnBytes = 100 * kMiB;
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

void Resources::Count(int64_t more) {
  std::lock_guard<std::mutex> lock(mutex_);
  bytes_ += more;
}

int64_t Resources::bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

void Communicator::SetState(nccl::Result result, const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  state = result;
  error = result == nccl::kSuccess ? "" : text;
}

nccl::Result Communicator::Occupy() {
  const int64_t taken = shares ? kSharedBytes : kOwnBytes;
  if (!Reserve(device, taken)) return CudaFailure(cuda::kOutOfMemory);
  std::lock_guard<std::mutex> lock(mutex);
  bytes = taken;
  resources->Count(taken);
  return nccl::kSuccess;
}

void Communicator::Vacate() {
  std::lock_guard<std::mutex> lock(mutex);
  Release(device, bytes);
  resources->Count(-bytes);
  bytes = 0;
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

Result ncclCommMemStats(Comm comm, MemStat stat, uint64_t* value) {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclCommMemStats", fake::Number(comm));
  JAXCOMM_FAKE_FIND(communicator, comm);
  if (value == nullptr) return fake::Failure(kInvalidArgument, "value is null");
  // Nothing asks for the others.
  if (stat != MemStat::kTotal) {
    return fake::Failure(kInvalidArgument, "ncclCommMemStats: unknown statistic");
  }
  *value = static_cast<uint64_t>(communicator->resources->bytes());
  return kSuccess;
}

}  // namespace jaxcomm::nccl
