// One execution of a call site by the ranks of this process in a group.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_ROUND_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_ROUND_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/backends/host/reduce/execute.h"
#include "ffi/backends/host/reduce/host_plan.h"
#include "ffi/base/status.h"
#include "ffi/core/call_site.h"
#include "ffi/core/rendezvous.h"
#include "ffi/flight/flight_recorder.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// A rank's part in a round.
struct LocalParticipant {
  enum State : uint8_t { kAbsent, kWaiting, kDone };
  State state = kAbsent;
  // A rank that waits in its handler completes its promise itself, with `status`, once
  // `is_complete` is set.
  bool is_in_handler = false;
  std::atomic<bool> is_complete{false};
  Status status;
  int moves_left = 0;  // pairwise: before this rank is done
  FlightRecorder::Ticket ticket = 0;
  std::vector<const void*> operands;
  std::vector<void*> results;
  std::vector<xla::ffi::Promise> promise;  // one while waiting, else none

  bool has_come() const { return state != kAbsent; }
};

struct LocalRound : RoundOf<LocalParticipant> {
  using Clock = std::chrono::steady_clock;

  // Alive while a rank waits or is in its handler: XLA keeps the program of an
  // execution. A pairwise round may last longer, with neither.
  CallSite* call_site = nullptr;
  std::shared_ptr<const std::string> label;  // the call site's, for messages
  const HostPlan* plan = nullptr;
  HostPlan own_plan;   // of collectives that plan from operand values
  int64_t number = 0;  // counts the rounds of the group
  uint64_t run = 0;    // number of the run, equal on all processes
  int come = 0;        // ranks that have come
  int unfinished = 0;  // ranks that are not done, the missing ones too
  int moving = 0;      // threads that move bytes for it
  Clock::time_point waiting_since;
  // The user has interrupted the program.
  std::optional<Clock::time_point> interrupted_at;
  std::vector<const void* const*> operands;  // the participants' arrays, by rank
  std::vector<void* const*> results;
  std::vector<int> ranks_missing;  // pairwise: for each move
  int in_handlers = 0;  // ranks that wait in their handlers, and can help to move
  Offer offer{nullptr};
  std::vector<std::shared_ptr<SharedBlocks>> offered;

  explicit LocalRound(size_t ranks) : operands(ranks), results(ranks) {
    participants.resize(ranks);
  }

  // Prepares the round for another execution.
  void Reset(CallSite* site, int64_t of_group) {
    for (LocalParticipant& participant : participants) {
      participant.state = LocalParticipant::kAbsent;
      participant.is_in_handler = false;
      participant.is_complete.store(false, std::memory_order_relaxed);
      participant.promise.clear();
    }
    call_site = site;
    label = site->label();
    plan = nullptr;
    number = of_group;
    come = moving = in_handlers = 0;
    unfinished = static_cast<int>(participants.size());
    ranks_missing.clear();
    waiting_since = Clock::now();
    interrupted_at.reset();
    offer.store(nullptr, std::memory_order_relaxed);
    offered.clear();
  }

  bool HasWaiting() const {
    return come > static_cast<int>(participants.size()) - unfinished;
  }
  bool IsWaiting(int rank) const {
    return participants[rank].state == LocalParticipant::kWaiting;
  }
  CallMoves moves() const {
    return {plan, &call_site->results(), call_site->attributes().reduce,
            operands.data(), results.data()};
  }
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_ROUND_H_
