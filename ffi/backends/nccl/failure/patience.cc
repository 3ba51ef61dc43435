#include "ffi/backends/nccl/failure/patience.h"

#include <atomic>
#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "ffi/backends/nccl/failure/health.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {

Status RunPatiently(Health& health, std::shared_ptr<void> owner,
                    const std::string& what, const NcclPatience& patience,
                    std::function<Status()> call) {
  auto promise = std::make_shared<std::promise<Status>>();
  auto answer = promise->get_future();
  const auto run = [owner = std::move(owner), &health, promise,
                    call = std::move(call)] {
    const Health::InNccl in_nccl(health);
    promise->set_value(call());
  };
  ASSIGN_OR_RETURN(std::thread thread, StartThread(run));
  const Status ended = Wait(patience, what, [&] {
    return answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  });
  if (ended.failure()) {
    thread.detach();
    health.Fail({ended});
    return ended;
  }
  thread.join();
  return answer.get();
}

Status RunGuarded(Health& health, const std::string& what, const NcclPatience& patience,
                  const std::function<Status()>& call) {
  const Health::InNccl in_nccl(health);
  std::atomic<bool> done{false};
  NcclPatience of_guard = patience;
  of_guard.interrupted = nullptr;  // Python tells its main thread alone
  ASSIGN_OR_RETURN(std::thread guard, StartThread([&] {
                     const Status ended =
                         Wait(of_guard, what, [&] { return done.load(); });
                     if (ended.failure()) health.Fail({ended});
                   }));
  Status status = call();
  done = true;
  guard.join();
  // If it was aborted, its streams may have come to their ends, too.
  if (health.failed()) return health.failure();
  if (status.failure()) health.Fail({status});
  return status;
}

}  // namespace jaxcomm
