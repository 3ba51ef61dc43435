// Where the ranks of a group that live in one process meet.
//
// Ranks may come to their calls in different orders, and a rank that waits for nobody
// may be several executions ahead. So they meet by run and tag, not by order: a rank
// joins the oldest round of its run and tag to which it has not come. A round is one
// execution of one call site; a participant is a rank's part of it.
#ifndef JAXCOMM_FFI_CORE_RENDEZVOUS_H_
#define JAXCOMM_FFI_CORE_RENDEZVOUS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/base/status.h"

namespace jaxcomm {

// The base of a round. A participant has `bool has_come() const`.
template <typename Participant>
struct RoundOf {
  int64_t run_id = 0;
  uint64_t tag = 0;
  std::deque<Participant> participants;  // by rank; they never move
};

// Not thread-safe: the owner has a lock.
template <typename Round>
class Rendezvous {
 public:
  using Rounds = std::vector<std::unique_ptr<Round>>;

  // The open rounds, the oldest first.
  const Rounds& open() const { return open_; }
  // The rounds that Keep() was given.
  const Rounds& spare() const { return spare_; }

  // The oldest open round of this run and tag to which the rank has not come. Null if
  // there is none.
  Round* Find(int64_t run_id, uint64_t tag, int rank) const {
    for (const auto& round : open_) {
      if (round->run_id == run_id && round->tag == tag &&
          !round->participants[static_cast<size_t>(rank)].has_come()) {
        return round.get();
      }
    }
    return nullptr;
  }

  // A round that is over, to be used again. Null if there is none.
  std::unique_ptr<Round> TakeSpare() {
    if (spare_.empty()) return nullptr;
    std::unique_ptr<Round> round = std::move(spare_.back());
    spare_.pop_back();
    return round;
  }

  // Opens a round in which nobody has come.
  Round* Open(std::unique_ptr<Round> round, int64_t run_id, uint64_t tag) {
    round->run_id = run_id;
    round->tag = tag;
    open_.push_back(std::move(round));
    return open_.back().get();
  }

  // Closes an open round: no rank finds it any more.
  std::unique_ptr<Round> Close(const Round* round) {
    const auto found = std::find_if(open_.begin(), open_.end(), [&](const auto& open) {
      return open.get() == round;
    });
    std::unique_ptr<Round> closed = std::move(*found);
    open_.erase(found);
    return closed;
  }

  // Keeps a round that is over for TakeSpare().
  void Keep(std::unique_ptr<Round> round) { spare_.push_back(std::move(round)); }

  // Has the ranks of a run that come from now on fail with `reason`, instead of opening
  // rounds: a rank of it has failed, and will not come. The first reason stands.
  // Remembers the last 64 runs. Returns whether this one is new.
  bool Refuse(int64_t run_id, Status reason) {
    if (Refusal(run_id).failure()) return false;
    refused_.emplace_back(run_id, std::move(reason));
    if (refused_.size() > kMostRefused) refused_.pop_front();
    return true;
  }

  // Why a rank of the run is refused. Success if it is not.
  Status Refusal(int64_t run_id) const {
    for (const auto& [run, reason] : refused_) {
      if (run == run_id) return reason;
    }
    return OkStatus();
  }

  std::vector<int64_t> RefusedRuns() const {
    std::vector<int64_t> runs;
    for (const auto& refused : refused_) runs.push_back(refused.first);
    return runs;
  }

 private:
  static constexpr size_t kMostRefused = 64;

  Rounds open_, spare_;
  std::deque<std::pair<int64_t, Status>> refused_;  // by run
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_RENDEZVOUS_H_
