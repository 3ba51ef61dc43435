#include "ffi/backends/host/local/local_timeout.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "ffi/os/mutex.h"

namespace jaxcomm {

const LocalRound* LocalTimeout::WaitsElsewhere(int rank,
                                               const LocalRound& round) const {
  for (const auto& other : rounds_.open()) {
    if (other.get() != &round && other->IsWaiting(rank)) return other.get();
  }
  return nullptr;
}

namespace {

struct Hint {
  Mutex mutex;
  std::string text GUARDED_BY(mutex);
};

// Never destroyed: threads read it while the process exits.
Hint& HintOfProcess() {
  static Hint* const hint = new Hint;
  return *hint;
}

}  // namespace

std::string HintIfLate(const CommunicatorSpec& spec) {
  if (!spec.hint_if_late.empty()) return spec.hint_if_late;
  Hint& hint = HintOfProcess();
  MutexLock lock(hint.mutex);
  return hint.text;
}

void SetHintIfLate(std::string hint) {
  Hint& own = HintOfProcess();
  MutexLock lock(own.mutex);
  own.text = std::move(hint);
}

bool LocalTimeout::LacksRanks(const LocalRound& round) const {
  if (!round.HasWaiting()) return false;
  return std::any_of(members_.here.begin(), members_.here.end(), [&](int rank) {
    // A rank that waits in another collective has a thread.
    return !round.participants[rank].has_come() &&
           WaitsElsewhere(rank, round) == nullptr;
  });
}

std::string LocalTimeout::NoticeOf(const LocalRound& round, double seconds) const {
  char waited[32];
  std::snprintf(waited, sizeof(waited), "%.0f", seconds);
  const std::vector<int> missing = Missing(round);
  const std::string hint = HintIfLate(spec_);
  return StrCat("jaxcomm: still waiting: ", *round.label, " over axes ", spec_.axes,
                ": ", ListText(missing, "rank"), " of ", members_.size(),
                missing.size() > 1 ? " have" : " has", " not come for ", waited, " s.",
                hint.empty() ? "" : " ", hint, "\n");
}

LocalFailure LocalTimeout::FailureOf(const LocalRound& round) const {
  std::string hint = LacksRanks(round) ? HintIfLate(spec_) : "";
  if (!hint.empty()) hint = " " + hint;
  LocalFailure failure;
  if (round.interrupted_at) {
    failure.to_all =
        Status(ErrorCode::kCancelled,
               StrCat(*round.label, " over axes ", spec_.axes,
                      ": interrupted while a rank waited for others.", hint));
    return failure;
  }
  failure.to_all =
      Status(ErrorCode::kDeadlineExceeded,
             StrCat(*round.label, " over axes ", spec_.axes,
                    ": the other ranks stopped waiting for this one after ",
                    spec_.timeout_seconds, " s; see JAXCOMM_TIMEOUT.", hint));
  for (int rank = 0; rank < members_.size(); ++rank) {
    failure.to_rank.push_back(TextFor(rank, round) + hint);
  }
  return failure;
}

std::vector<int> LocalTimeout::Missing(const LocalRound& round) const {
  std::vector<int> missing;
  for (int rank : members_.here) {
    if (!round.participants[rank].has_come()) missing.push_back(rank);
  }
  return missing;
}

std::string LocalTimeout::TextFor(int rank, const LocalRound& round) const {
  const std::vector<int> missing = Missing(round);
  std::string text = StrCat(
      *round.label, " over axes ", spec_.axes, ": ", RankText(spec_, members_, rank),
      " waited ", spec_.timeout_seconds, " s for ", ListText(missing, "rank"), ".");
  bool is_elsewhere = false;
  for (int other : missing) {
    const LocalRound* const elsewhere = WaitsElsewhere(other, round);
    if (elsewhere == nullptr) continue;
    is_elsewhere = true;
    text += StrCat(" Rank ", other, " waits in ", *elsewhere->label, " instead.");
  }
  return text + (is_elsewhere
                     ? " Every rank must run the same collectives; a jax.lax.cond on "
                       "axis_index is a usual cause. See JAXCOMM_TIMEOUT."
                     : " They may have stopped or run a different program; see "
                       "JAXCOMM_TIMEOUT.");
}

}  // namespace jaxcomm
