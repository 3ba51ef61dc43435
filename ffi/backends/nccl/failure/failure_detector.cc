#include "ffi/backends/nccl/failure/failure_detector.h"

#include <algorithm>
#include <utility>

#include "ffi/backends/nccl/engines/engine.h"
#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/backends/nccl/failure/process_failure.h"
#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/queue/local_rank.h"

namespace jaxcomm {
namespace {

// How much earlier than the system NCCL may learn that a process has ended, on a
// machine that is busy.
constexpr auto kWaitForPeerExitAfterNcclError = std::chrono::milliseconds(500);

using What = FailureDetector::Finding::What;

}  // namespace

FailureDetector::Finding FailureDetector::Look() {
  Finding found = LookForPeers();
  for (size_t i = 0; i < ranks_.size() && found.what == What::kNothing; ++i) {
    found = LookAt(*ranks_[i]);
  }
  return found;
}

FailureDetector::Finding FailureDetector::LookAt(LocalRank& rank) {
  const std::chrono::duration<double> timeout(spec_.timeout_seconds);
  InFlight::Overdue overdue = rank.queue.Poll(timeout);
  for (Engine* engine : engines_) {
    Status error = engine->AsyncError(rank);
    if (error.success()) continue;
    overdue = rank.queue.First();
    overdue.status = std::move(error);
  }
  const bool is_late = overdue.status.success();
  if ((is_late && !overdue.found) || DevicesAreStopped()) return {};
  if (!is_late && world_.sees_peers()) {
    // NCCL may be the first to notice that a process has ended. It does not say which.
    if (error_seen_ == Clock::time_point()) error_seen_ = Clock::now();
    if (Clock::now() - error_seen_ < kWaitForPeerExitAfterNcclError) {
      return {What::kLookAgainSoon};
    }
  }
  // Else what waits for the rank, which does nothing.
  std::string text = overdue.found
                         ? Describe(overdue, spec_, rank.facts)
                         : StrCat(FirstOperation(ranks_, spec_, rank.facts.group),
                                  rank.facts.ToString(), ": ");
  text += is_late ? DescribeLate(spec_) : overdue.status.message();
  return {What::kFailure,
          {Status(is_late ? ErrorCode::kDeadlineExceeded : ErrorCode::kUnavailable,
                  std::move(text)),
           /*names_a_call=*/true, is_late ? "timeout" : "error"}};
}

std::string FailureDetector::LostPeers() const {
  std::string lost;
  if (spec_.processes.empty()) return lost;
  const std::vector<int> gone = world_.gone();
  for (const auto& mine : ranks_) {
    const std::vector<int>& processes = spec_.processes[mine->facts.group];
    for (size_t rank = 0; rank < processes.size(); ++rank) {
      if (std::find(gone.begin(), gone.end(), processes[rank]) == gone.end()) continue;
      const std::string text =
          StrCat("process ", processes[rank], " (rank ", rank, ")");
      if (lost.find(text) != std::string::npos) continue;
      lost += StrCat(lost.empty() ? "" : ", ", text);
    }
  }
  return lost;
}

std::string FailureDetector::LostPeersSoon() const {
  std::string lost;
  if (!world_.sees_peers() || spec_.processes.empty()) return lost;
  (void)Wait({kWaitForPeerExitAfterNcclError.count() * 1e-3}, "", [&] {
    lost = LostPeers();
    return !lost.empty();
  });
  return lost;
}

FailureDetector::Finding FailureDetector::LookForPeers() {
  if (!world_.any_gone()) return {};
  const std::string lost = LostPeers();
  if (lost.empty()) return {};
  if (peer_lost_ == Clock::time_point()) peer_lost_ = Clock::now();
  const bool may_drain =
      HaveWork(ranks_) && Clock::now() - peer_lost_ < kDrainAfterPeerExit;
  // If nothing of it fails, others that are at work may do without the process.
  const bool may_wait = !AreBusy(ranks_) && ProcessFailure::Get().IsAnyBusy();
  if (may_drain || may_wait) return {What::kLookAgainSoon};
  std::string text = FirstOperation(ranks_, spec_);
  const bool names_a_call = !text.empty();
  if (text.empty()) text = NameOf(spec_) + ": ";
  return {What::kFailure,
          {Status(ErrorCode::kAborted, StrCat(text, lost, " has ended")), names_a_call,
           "peer gone"}};
}

}  // namespace jaxcomm
