#include "ffi/backends/host/local/peer_failure.h"

#include <chrono>
#include <cmath>
#include <vector>

namespace jaxcomm {

std::string PeerFailure::NameOf(int process) const {
  return StrCat("process ", spec_.process_set->peers()[process].process_index);
}

std::string PeerFailure::Caller(const LocalRound& round) const {
  return StrCat(round.call_site->description(), " (lane '", spec_.lane, "', operation ",
                round.number, "): ", ListText(members_.here, "rank"), " of ",
                members_.size(), " (", spec_.platform, ":",
                members_.devices[members_.here[0]],
                members_.here.size() > 1 ? " ..." : "", ", ",
                NameOf(spec_.process_set->arena().self()), ")");
}

Status PeerFailure::StatusOf(const LocalRound& round, const Transfer& transfer) const {
  const Status& status = transfer.status();
  const ErrorCode code = *status.errc();
  if (code == ErrorCode::kDeadlineExceeded && transfer.absent() != 0) {
    return Status(code, TextOf(round, transfer.absent(), Hindrance::kLate));
  }
  const uint64_t gone = spec_.process_set->gone() & members_.processes;
  if (code == ErrorCode::kAborted && gone != 0) {
    return Status(code, TextOf(round, gone, Hindrance::kEnded));
  }
  return Status(code, StrCat(Caller(round), ": ", status.message()));
}

std::string PeerFailure::TextOf(const LocalRound& round, uint64_t processes,
                                Hindrance hindrance) const {
  const bool ended = hindrance == Hindrance::kEnded;
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(members_.process_of.size()); ++rank) {
    if ((processes >> members_.process_of[rank]) & 1) ranks.push_back(rank);
  }
  std::string text = Caller(round);
  if (ended) {
    text += StrCat(" waited for ", ListText(ranks, "rank"), ", gone with");
  } else {
    const double waited =
        std::chrono::duration<double>(LocalRound::Clock::now() - round.waiting_since)
            .count();
    text += StrCat(
        " waited ", std::llround(waited * 10) / 10.0, " s for ",
        ranks.empty() ? "bytes that are on their way" : ListText(ranks, "rank"), ".");
  }
  for (uint64_t mask = processes; mask != 0; mask &= mask - 1) {
    text += LastCallOf(__builtin_ctzll(mask), ended);
  }
  if (ended) return text + AdviceAfterEnd(processes);
  if (hindrance == Hindrance::kDeadlock) {
    return text +
           " Each waits there for another one, and nothing else runs in any of them: "
           "none can go on. Every rank must run the same collectives in the same "
           "order. Before the next program call jaxcomm.finalize(), then "
           "jaxcomm.init(), in every process.";
  }
  return text +
         " They may have stopped or run a different program; see JAXCOMM_TIMEOUT. "
         "Before the next program call jaxcomm.finalize(), then jaxcomm.init(), in "
         "every process: they may be out of step.";
}

std::string PeerFailure::LastCallOf(int process, bool ended) const {
  const ProcessSet& set = *spec_.process_set;
  const ProcessState& state = set.arena().process(process);
  const bool has_left =
      state.presence.load(std::memory_order_acquire) == ProcessState::kLeft;
  std::string name = NameOf(process);
  std::string text;
  if (ended) {
    text = StrCat(" ", name, " (pid ", set.peers()[process].pid, "), which ",
                  has_left ? "called finalize or exited" : "died", ".");
  }
  if (has_left) return text;
  name[0] = 'P';
  const std::vector<std::string> calls = set.arena().CallsOf(process);
  const std::string last = state.last.Load();
  if (!ended && !calls.empty()) {
    return StrCat(text, " ", name, " waits in ", calls.front(), " instead.");
  }
  if (last.empty()) return StrCat(text, " ", name, " has called nothing yet.");
  return StrCat(text, " ", name, " was last in ", last, ", operation ",
                state.last_number.load(std::memory_order_relaxed), ".");
}

uint64_t PeerFailure::HaveLeft(uint64_t processes) const {
  uint64_t left = 0;
  for (uint64_t mask = processes; mask != 0; mask &= mask - 1) {
    const int process = __builtin_ctzll(mask);
    const ProcessState& state = spec_.process_set->arena().process(process);
    if (state.presence.load(std::memory_order_acquire) == ProcessState::kLeft) {
      left |= uint64_t{1} << process;
    }
  }
  return left;
}

std::string PeerFailure::AdviceAfterEnd(uint64_t processes) const {
  if (HaveLeft(processes) == processes) {
    return " It ended, or called jaxcomm.finalize(), before this collective. It may "
           "have had fewer steps, or raised an exception: every process must run the "
           "same collectives.";
  }
  for (uint64_t mask = processes; mask != 0; mask &= mask - 1) {
    const int process = __builtin_ctzll(mask);
    if (spec_.process_set->peers()[process].process_index != 0) continue;
    return " Process 0 runs JAX's coordination service, unless python -m "
           "jaxcomm.launch --elastic does: without it JAX ends this process too.";
  }
  return " Call jaxcomm.shrink(mesh, axis) and go on with the devices that remain. JAX "
         "ends this process once it misses the other's heartbeats, unless "
         "jax_enable_recoverability is set or python -m jaxcomm.launch --elastic "
         "started it.";
}

}  // namespace jaxcomm
