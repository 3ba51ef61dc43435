// How communicators end, and what they say of themselves.

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/communicator.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/group.h"
#include "tests/doubles/nccl/settings.h"
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
  while (!HasEnded(graph)) std::this_thread::sleep_for(kLook);
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

}  // namespace
}  // namespace jaxcomm::fake

namespace jaxcomm::nccl {

Result ncclCommFinalize(Comm comm) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommFinalize", fake::Number(comm));
  JAXCOMM_FAKE_FIND(communicator, comm);
  communicator->finalized = true;
  fake::Job job;
  job.run = [communicator] {
    fake::WaitUntilIdle(*communicator);
    return kSuccess;
  };
  if (!fake::IsBlocking(communicator->config)) job.background = communicator;
  return fake::Submit(std::move(job));
}

Result ncclCommDestroy(Comm comm) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommDestroy", fake::Number(comm));
  const auto communicator = fake::Communicators().Find(comm);
  if (communicator == nullptr) return fake::NoSuch();
  if (communicator->job.joinable()) communicator->job.join();
  std::string text;
  const Result error = fake::AsyncError(communicator.get(), &text);
  // Others of its family may go after one was aborted.
  if (error != kSuccess && !communicator->resources->aborted()) {
    return fake::Failure(error,
                         text + " (after an error a communicator can only be aborted)");
  }
  if (fake::Communicators().Remove(comm) == nullptr) return fake::NoSuch();
  ++fake::ended_communicators;
  fake::WaitUntilIdle(*communicator);
  fake::WaitForGraphs(*communicator);
  fake::WaitForDevice(communicator->device);
  fake::Leave(*communicator);
  return kSuccess;
}

Result ncclCommAbort(Comm comm) {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclCommAbort", fake::Number(comm));
  const auto communicator = fake::Communicators().Remove(comm);
  if (communicator == nullptr) return fake::NoSuch();
  ++fake::ended_communicators;
  communicator->resources->Abort();
  if (fake::DeviceFailure() != cuda::kSuccess) {
    // The flag is in host memory. What follows asks CUDA, which answers nothing.
    return fake::CudaFailure(fake::DeviceFailure());
  }
  fake::WaitUntilStopped(*communicator);
  if (communicator->job.joinable()) communicator->job.join();
  fake::WaitForGraphs(*communicator);
  // NCCL frees its memory, and so waits for the kernels of others (two H200s, 2.28.9).
  fake::WaitForDevice(communicator->device);
  fake::Leave(*communicator);
  return kSuccess;
}

Result ncclCommGetAsyncError(Comm comm, Result* error) {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclCommGetAsyncError", fake::Number(comm));
  const auto communicator = fake::Communicators().Find(comm);
  if (communicator == nullptr) return fake::NoSuch();
  if (error == nullptr) return fake::Failure(kInvalidArgument, "asyncError is null");
  std::string text;
  *error = fake::AsyncError(communicator.get(), &text);
  if (!text.empty()) fake::Failure(*error, text);
  return kSuccess;
}

// It looks at no communicator. That of NCCL is the last of all threads.
const char* ncclGetLastError(Comm) { return fake::LastFailure().c_str(); }

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
