#include "ffi/backends/nccl/failure/patience.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "ffi/backends/nccl/failure/health.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {

namespace {

using Clock = std::chrono::steady_clock;

// A look reads a file for each process.
constexpr auto kBetweenLooks = std::chrono::milliseconds(10);
constexpr auto kAfterEnd = std::chrono::milliseconds(100);

}  // namespace

Status NcclPatience::LateError(std::string_view what) const {
  return Status(ErrorCode::kDeadlineExceeded,
                StrCat(what, " is not done after ", seconds,
                       " s; other processes may not have come to it"));
}

NcclPatience WhilePeersLive(const NcclPatience& patience, std::vector<Peer> peers) {
  Clock::time_point next_look = Clock::now(), end = Clock::time_point::max();
  NcclPatience shorter = patience;
  shorter.interrupted = [=, peers = std::move(peers),
                         interrupted = patience.interrupted]() mutable {
    const auto now = Clock::now();
    if (end == Clock::time_point::max() && now >= next_look) {
      next_look = now + kBetweenLooks;
      if (std::any_of(peers.begin(), peers.end(), HasEnded)) end = now + kAfterEnd;
    }
    return now > end || interrupted();
  };
  return shorter;
}

Status WithEndedPeers(const Status& error, const std::vector<Peer>& peers) {
  std::string ended;
  for (const Peer& peer : peers) {
    if (!HasEnded(peer)) continue;
    ended += StrCat(ended.empty() ? "" : ", ", "process ", peer.process_index);
  }
  if (ended.empty()) return error;
  return Status(ErrorCode::kAborted, StrCat(ended, " ended while NCCL waited for all (",
                                            error.message(), ")"));
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
  const auto end = Clock::now() + std::chrono::duration<double>(patience.seconds);
  while (answer.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    Status status = OkStatus();
    if (patience.interrupted()) {
      status = Status(ErrorCode::kCancelled, "interrupted");
    } else if (Clock::now() > end) {
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
