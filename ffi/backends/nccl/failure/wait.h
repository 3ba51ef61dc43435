// How a thread of the host waits for other ranks, for NCCL or for a device.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_WAIT_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_WAIT_H_

#include <chrono>
#include <functional>
#include <string>
#include <string_view>

#include "ffi/base/status.h"

namespace jaxcomm {

// How long the end of a communicator waits for streams and other ranks, before it goes
// on by force.
constexpr double kGraceSeconds = 10;

// How long to wait, and what else ends a wait. What is null ends none.
struct NcclPatience {
  double seconds = 300;
  // Whether Ctrl-C was pressed.
  std::function<bool()> interrupted = nullptr;
  // Why no wait makes sense any more: a failure, or devices that are stopped.
  std::function<Status()> refusal = nullptr;
  // The needed processes that have ended, as in "process 1 (rank 1)"; "" if none has.
  std::function<std::string()> lost_peers = nullptr;

  // "`what` is not done after 300 s; other processes may not have come to it. ...".
  Status LateError(std::string_view what) const;
};

// One wait, between two looks at what it waits for.
class Pauses {
 public:
  Pauses(const NcclPatience& patience, std::string_view what)
      : patience_(patience), what_(what) {}

  // Pauses, for a short part of the time that the wait has taken so far. Returns why
  // the wait is over instead.
  Status Next();

 private:
  using Clock = std::chrono::steady_clock;

  const NcclPatience& patience_;
  const std::string_view what_;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point lost_{};  // when processes were first seen to have ended
};

// Looks until `is_done` holds. Returns why the wait ended otherwise; a failure counts
// also where it is done.
template <typename IsDone>
Status Wait(const NcclPatience& patience, std::string_view what,
            const IsDone& is_done) {
  Pauses pauses(patience, what);
  while (true) {
    const bool done = is_done();
    // Asked after that: what is aborted comes to an end as well.
    if (patience.refusal != nullptr) RETURN_IF_ERROR(patience.refusal());
    if (done) return OkStatus();
    RETURN_IF_ERROR(pauses.Next());
  }
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_WAIT_H_
