// What ends a communicator from outside: a process that it needs has ended, NCCL
// reports an error, or an operation takes longer than the timeout.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_FAILURE_DETECTOR_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_FAILURE_DETECTOR_H_

#include <chrono>
#include <string>
#include <vector>

#include "ffi/backends/nccl/failure/process_failure.h"
#include "ffi/backends/nccl/failure/world_health.h"
#include "ffi/backends/nccl/library/rank_facts.h"
#include "ffi/base/status.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

class Engine;

class FailureDetector {
 public:
  // How long operations may take to end when a process that takes part in them has
  // ended: it may have done so in order, with its part in flight.
  static constexpr auto kDrainAfterPeerExit = std::chrono::milliseconds(20);

  struct Finding {
    enum class What { kNothing, kLookAgainSoon, kFailure };
    What what = What::kNothing;
    Cause cause = {};
  };

  // All must outlive it.
  FailureDetector(const CommunicatorSpec& spec, const WorldHealth& world,
                  const LocalRanks& ranks, const std::vector<Engine*>& engines)
      : spec_(spec), world_(world), ranks_(ranks), engines_(engines) {}

  // One thread at a time.
  Finding Look();

  // After an error of NCCL's, which does not say whose end it may come from: the ended
  // processes that it needs, "process 1 (rank 1)". Waits a moment for there to be one.
  std::string LostPeersSoon() const;
  // The ended processes that it needs, "" if none has.
  std::string LostPeers() const;

 private:
  using Clock = std::chrono::steady_clock;

  Finding LookForPeers();
  Finding LookAt(LocalRank& rank);

  const CommunicatorSpec& spec_;
  const WorldHealth& world_;
  const LocalRanks& ranks_;
  const std::vector<Engine*>& engines_;
  // When a process was first seen to be gone, and an error of NCCL's, which may have
  // that cause.
  Clock::time_point peer_lost_, error_seen_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_FAILURE_DETECTOR_H_
