#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"

namespace jaxcomm {

Status NcclCommunicator::Patiently(const char* what,
                                   std::function<Status(NcclCommunicator&)> call) {
  const auto self =
      std::static_pointer_cast<NcclCommunicator>(Watched::shared_from_this());
  auto promise = std::make_shared<std::promise<Status>>();
  auto answer = promise->get_future();
  std::thread thread(
      [self, promise, call = std::move(call)] { promise->set_value(call(*self)); });
  const auto end = Clock::now() + Seconds(how_.patience.seconds);
  while (answer.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    Status status = OkStatus();
    if (how_.patience.interrupted()) {
      status = Status(ErrorCode::kCancelled, "interrupted");
    } else if (Clock::now() > end) {
      status = Status(
          ErrorCode::kDeadlineExceeded,
          StrCat(what, " with the communicator over axes ", spec().axes, " (lane '",
                 spec().lane, "') is not done after ", how_.patience.seconds,
                 " s; other processes may not have come to it"));
    }
    if (status.success()) continue;
    thread.detach();
    FailStuck(status);
    return status;
  }
  thread.join();
  return answer.get();
}

std::vector<std::unique_lock<std::timed_mutex>> NcclCommunicator::LockAll(
    bool is_idle) {
  std::vector<std::unique_lock<std::timed_mutex>> locks;
  while (true) {
    // Never while it waits for another: NCCL may need the one to begin in the other.
    bool has_all = true;
    for (auto& rank : ranks_) {
      locks.emplace_back(rank->launching, std::try_to_lock);
      has_all = has_all && locks.back().owns_lock();
      CurrentContext current(library_.cuda, rank->context);
      rank->in_flight.Refresh();
      if (copies_ != nullptr) copies_->in_flight(rank->place).Refresh();
    }
    if (failed() || (has_all && (!is_idle || InFlightCount() == 0))) return locks;
    locks.clear();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Status NcclCommunicator::Suspend() {
  return Patiently("suspending", [](auto& self) { return self.SuspendNow(true); });
}

Status NcclCommunicator::Resume() {
  return Patiently("resuming", [](auto& self) { return self.SuspendNow(false); });
}

Status NcclCommunicator::SuspendNow(bool suspend) {
  if (library_.nccl.CommSuspend == nullptr || library_.nccl.CommResume == nullptr) {
    return FailedPrecondition("NCCL ", library_.VersionText(),
                              " cannot suspend a communicator; 2.29.7 and newer can");
  }
  if (shares_memory()) {
    return FailedPrecondition(
        "the communicator over axes ", spec().axes, " (lane '", spec().lane,
        "') shares its memory with the mesh's, which NCCL does not suspend; make it "
        "with CommPolicy(share=False)");
  }
  // What is on its way comes to its end. Once nothing is, nothing joins.
  const auto locks = LockAll(/*is_idle=*/suspend);
  if (failed()) return failure();
  if (is_suspended_ == suspend) return OkStatus();
  const char* const name = suspend ? "ncclCommSuspend" : "ncclCommResume";
  Status status = OkStatus();
  library_.nccl.GroupStart();
  for (auto& rank : ranks_) {
    if (rank->comm == nullptr || status.failure()) continue;
    CurrentContext current(library_.cuda, rank->context);
    status = library_.Check(
        suspend ? library_.nccl.CommSuspend(rank->comm, nccl::kSuspendMemory)
                : library_.nccl.CommResume(rank->comm),
        name, rank->comm);
  }
  Status ended = library_.Check(library_.nccl.GroupEnd(), name);
  if (status.success()) status = std::move(ended);
  std::vector<nccl::Comm> comms;
  for (auto& rank : ranks_) comms.push_back(rank->comm);
  if (status.success()) {
    NcclPatience patience = how_.patience;
    patience.interrupted = [this] { return failed(); };
    status = WaitUntilReady(library_, comms, patience, name);
  }
  if (status.success()) is_suspended_ = suspend;
  return status;
}

}  // namespace jaxcomm
