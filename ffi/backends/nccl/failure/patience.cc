#include "ffi/backends/nccl/failure/patience.h"

#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "ffi/backends/nccl/failure/health.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {

Status NcclPatience::LateError(std::string_view what) const {
  return Status(ErrorCode::kDeadlineExceeded,
                StrCat(what, " is not done after ", seconds,
                       " s; other processes may not have come to it"));
}

Status RunPatiently(Health& health, std::shared_ptr<void> owner,
                    const std::string& what, const NcclPatience& patience,
                    std::function<Status()> call) {
  auto promise = std::make_shared<std::promise<Status>>();
  auto answer = promise->get_future();
  ASSIGN_OR_RETURN(std::thread thread, StartThread([owner = std::move(owner), promise,
                                                    call = std::move(call)] {
                     promise->set_value(call());
                   }));
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::duration<double>(patience.seconds);
  while (answer.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    Status status = OkStatus();
    if (patience.interrupted()) {
      status = Status(ErrorCode::kCancelled, "interrupted");
    } else if (std::chrono::steady_clock::now() > end) {
      status = patience.LateError(what);
    }
    if (status.success()) continue;
    thread.detach();
    health.FailStuck(status);
    return status;
  }
  thread.join();
  return answer.get();
}

Status RunGuarded(Health& health, const std::string& what, const NcclPatience& patience,
                  const std::function<Status()>& call) {
  std::promise<void> done;
  ASSIGN_OR_RETURN(std::thread guard, StartThread([&, end = done.get_future()] {
                     const std::chrono::duration<double> seconds(patience.seconds);
                     if (end.wait_for(seconds) == std::future_status::ready) return;
                     health.FailStuck(patience.LateError(what));
                   }));
  Status status = call();
  done.set_value();
  guard.join();
  // If it was aborted, its streams may have come to their ends, too.
  if (health.failed()) return health.failure();
  if (status.failure()) health.FailStuck(status);
  return status;
}

}  // namespace jaxcomm
