// How communicators end, and what they say of themselves.
#include <chrono>
#include <string>
#include <thread>

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/capture.h"
#include "tests/doubles/nccl/communicator.h"
#include "tests/doubles/nccl/config.h"
#include "tests/doubles/nccl/contexts.h"
#include "tests/doubles/nccl/group.h"
#include "tests/doubles/nccl/registrations.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {
namespace {

// Or until an abort, of this one or of one in its family, has ended all it ran.
void WaitUntilIdle(Communicator& communicator) {
  std::unique_lock<std::mutex> lock(communicator.mutex);
  communicator.changed.wait(lock, [&] {
    return communicator.outstanding == 0 ||
           (communicator.Stopped() && communicator.running == 0);
  });
}

// Wakes what waits in the room, so that it sees that it must stop.
void Ring(Communicator& communicator) {
  std::shared_ptr<Room> room;
  {
    std::lock_guard<std::mutex> lock(communicator.mutex);
    room = communicator.room;
  }
  if (room == nullptr) return;
  Room::Lock lock(*room);
  room->Ring();
}

void WaitUntilStopped(Communicator& communicator) {
  Ring(communicator);
  std::unique_lock<std::mutex> lock(communicator.mutex);
  communicator.changed.notify_all();
  communicator.changed.wait(lock, [&] { return communicator.running == 0; });
}

void WaitForGraphs(Communicator& communicator) {
  std::unique_lock<std::mutex> lock(communicator.mutex);
  const uint64_t graph = communicator.graph;
  lock.unlock();
  while (!HasEnded(graph)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Leave(Communicator& communicator) {
  DropRegistrations(&communicator);
  communicator.Vacate();
  if (communicator.room == nullptr) return;
  Room::Lock lock(*communicator.room);
  Member& member = communicator.room->board().members[communicator.rank];
  if (member.process.pid != 0) member.state = Member::kLeft;
}

nccl::Result NoSuch() {
  return Failure(nccl::kInvalidArgument, "No such communicator, or it was destroyed");
}

nccl::Result Finalize(nccl::Comm comm) {
  std::shared_ptr<Communicator> communicator;
  const nccl::Result result = FindReady(comm, &communicator);
  if (result != nccl::kSuccess) return result;
  if (communicator->revoked) {
    return Failure(nccl::kInvalidUsage,
                   "ncclCommFinalize: the communicator was revoked");
  }
  communicator->finalized = true;
  Job job;
  job.run = [communicator] {
    WaitUntilIdle(*communicator);
    return nccl::kSuccess;
  };
  if (!IsBlocking(communicator->config)) job.background = communicator;
  job.undo = [] {};
  return Submit(std::move(job));
}

nccl::Result Destroy(nccl::Comm comm) {
  const std::shared_ptr<Communicator> communicator = Communicators().Find(comm);
  if (communicator == nullptr) return NoSuch();
  if (communicator->job.joinable()) communicator->job.join();
  std::string text;
  const nccl::Result error = AsyncError(communicator.get(), &text);
  // Others of its family may go after one was aborted.
  if (error != nccl::kSuccess && !communicator->resources->aborted()) {
    return Failure(error,
                   text + " (after an error a communicator can only be aborted)");
  }
  if (Communicators().Remove(comm) == nullptr) return NoSuch();
  WaitUntilIdle(*communicator);
  WaitForGraphs(*communicator);
  WaitForDevice(communicator->device);
  Leave(*communicator);
  return nccl::kSuccess;
}

nccl::Result Abort(nccl::Comm comm) {
  const std::shared_ptr<Communicator> communicator = Communicators().Remove(comm);
  if (communicator == nullptr) return NoSuch();
  communicator->resources->Abort();
  WaitUntilStopped(*communicator);
  if (communicator->job.joinable()) communicator->job.join();
  WaitForGraphs(*communicator);
  // NCCL frees its memory, and so waits for the kernels of others (two H200s, 2.28.9).
  WaitForDevice(communicator->device);
  Leave(*communicator);
  return nccl::kSuccess;
}

nccl::Result Revoke(nccl::Comm comm, int flags) {
  const std::shared_ptr<Communicator> communicator = Communicators().Find(comm);
  if (communicator == nullptr) return NoSuch();
  if (flags != 0) return Failure(nccl::kInvalidArgument, "revokeFlags must be 0");
  communicator->revoked = true;
  WaitUntilStopped(*communicator);
  return nccl::kSuccess;
}

}  // namespace
}  // namespace jaxcomm::fake

namespace jaxcomm::nccl {

Result ncclCommFinalize(Comm comm) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommFinalize", fake::Number(comm));
  return fake::Spoil(fake::Finalize(comm));
}

Result ncclCommDestroy(Comm comm) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommDestroy", fake::Number(comm));
  fake::UseRuntime();
  return fake::Destroy(comm);
}

Result ncclCommAbort(Comm comm) {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclCommAbort", fake::Number(comm));
  fake::UseRuntime();
  return fake::Abort(comm);
}

Result ncclCommRevoke(Comm comm, int flags) {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclCommRevoke", fake::Number(comm));
  return fake::Revoke(comm, flags);
}

Result ncclCommGetAsyncError(Comm comm, Result* error) {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclCommGetAsyncError", fake::Number(comm));
  const auto communicator = fake::Communicators().Find(comm);
  if (communicator == nullptr) return fake::NoSuch();
  if (error == nullptr) return fake::Failure(kInvalidArgument, "asyncError is null");
  std::string text;
  *error = fake::AsyncError(communicator.get(), &text);
  return kSuccess;
}

const char* ncclGetLastError(Comm comm) {
  thread_local std::string text;
  text = "";
  const auto communicator = fake::Communicators().Find(comm);
  if (communicator != nullptr) (void)fake::AsyncError(communicator.get(), &text);
  if (text.empty()) text = fake::LastFailure();
  return text.c_str();
}

}  // namespace jaxcomm::nccl

int jaxcommFakeAsyncError(int64_t number, int result) {
  using namespace jaxcomm;  // NOLINT: an exported function cannot live there
  const auto communicator =
      fake::Communicators().Find(reinterpret_cast<nccl::Comm>(number));
  if (communicator == nullptr) return 0;
  communicator->SetState(static_cast<nccl::Result>(result),
                         "An asynchronous error that a test asked for");
  return 1;
}
