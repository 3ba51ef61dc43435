#include "ffi/backends/nccl/failure/wait.h"

#include <algorithm>
#include <thread>

namespace jaxcomm {
namespace {

// A process that has ended may have done its part before.
constexpr auto kAfterEnd = std::chrono::milliseconds(100);

// A short wait is looked at without a pause. A long one ends late by a sixteenth of its
// time at most.
constexpr int kPartOfWait = 16;
constexpr auto kLeastPause = std::chrono::microseconds(50);
constexpr auto kMostPause = std::chrono::milliseconds(1);

}  // namespace

Status NcclPatience::LateError(std::string_view what) const {
  return Status(
      ErrorCode::kDeadlineExceeded,
      StrCat(what, " is not done after ", seconds,
             " s; other processes may not have come to it. See JAXCOMM_TIMEOUT"));
}

Status Pauses::Next() {
  const auto now = Clock::now();
  const Clock::duration waited = now - begin_;
  if (patience_.interrupted != nullptr && patience_.interrupted()) {
    return Status(ErrorCode::kCancelled, "interrupted");
  }
  if (patience_.lost_peers != nullptr) {
    const std::string lost = patience_.lost_peers();
    if (lost.empty()) {
      lost_ = {};
    } else if (lost_ == Clock::time_point()) {
      lost_ = now;
    } else if (now - lost_ > kAfterEnd) {
      return Status(ErrorCode::kAborted,
                    StrCat(what_, " is not done, and ", lost, " has ended"));
    }
  }
  if (waited > std::chrono::duration<double>(patience_.seconds)) {
    return patience_.LateError(what_);
  }
  const Clock::duration pause =
      std::min<Clock::duration>(waited / kPartOfWait, kMostPause);
  if (pause < kLeastPause) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(pause);
  }
  return OkStatus();
}

}  // namespace jaxcomm
