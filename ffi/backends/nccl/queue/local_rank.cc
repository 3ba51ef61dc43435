#include "ffi/backends/nccl/queue/local_rank.h"

#include <algorithm>
#include <map>

namespace jaxcomm {

LocalRanks MakeRanks(const NcclLibrary& library, const CommunicatorSpec& spec,
                     const std::vector<NcclDevice>& devices,
                     const PrimaryContexts& contexts, FlightRecorder& recorder,
                     Health& health) {
  LocalRanks ranks;
  for (size_t i = 0; i < devices.size(); ++i) {
    RankFacts facts = FindRank(spec.groups, devices[i].id);
    if (facts.size == 0) continue;
    facts.place = ranks.size();
    facts.ordinal = devices[i].ordinal;
    facts.context = contexts[i];
    ranks.push_back(std::make_unique<LocalRank>(library, facts, recorder, health));
  }
  return ranks;
}

void Refresh(const LocalRanks& ranks) {
  for (const auto& rank : ranks) rank->queue.Refresh();
}

int64_t CountInFlight(const LocalRanks& ranks) {
  int64_t count = 0;
  for (const auto& rank : ranks) count += rank->queue.size() + rank->queue.launches();
  return count;
}

bool AreBusy(const LocalRanks& ranks) { return HaveWork(ranks) || WereCaptured(ranks); }

bool HaveWork(const LocalRanks& ranks) {
  // Threads first, of all ranks: what one gives a stream, which may be another rank's,
  // is in flight before the thread is counted off.
  const auto any = [&ranks](const auto& has) {
    return std::any_of(ranks.begin(), ranks.end(), has);
  };
  return any([](const auto& rank) { return rank->queue.giving.load() > 0; }) ||
         any([](const auto& rank) { return rank->queue.waiting.load() > 0; }) ||
         any([](const auto& rank) { return rank->queue.size() > 0; });
}

bool WereCaptured(const LocalRanks& ranks) {
  return std::any_of(ranks.begin(), ranks.end(),
                     [](const auto& rank) { return rank->queue.was_captured(); });
}

std::set<int64_t> Late(const LocalRanks& ranks) {
  std::map<int, uint64_t> furthest;
  for (const auto& rank : ranks) {
    uint64_t& of_group = furthest[rank->facts.group];
    of_group = std::max(of_group, rank->queue.reached());
  }
  std::set<int64_t> late;
  for (const auto& rank : ranks) {
    const bool is_behind = rank->queue.reached() < furthest[rank->facts.group];
    if (is_behind) late.insert(rank->facts.ordinal);
  }
  return late;
}

bool IsGroupGiven(const LocalRanks& ranks, int group) {
  return std::any_of(ranks.begin(), ranks.end(), [group](const auto& rank) {
    return rank->facts.group == group && rank->queue.given() > 0;
  });
}

std::string FirstOperation(const LocalRanks& ranks, const CommunicatorSpec& spec,
                           std::optional<int> group) {
  for (const auto& rank : ranks) {
    if (rank->facts.group != group.value_or(rank->facts.group)) continue;
    const InFlight::Overdue first = rank->queue.First();
    if (first.found) return Describe(first, spec, rank->facts);
  }
  return "";
}

ErrorOr<LaunchLocks> LockAll(const LocalRanks& ranks, const NcclPatience& patience) {
  LaunchLocks locks;
  RETURN_IF_ERROR(Wait(patience, "waiting for calls of other threads", [&] {
    bool has_all = true;
    for (const auto& rank : ranks) {
      locks.emplace_back(rank->queue.launching, std::try_to_lock);
      has_all = has_all && locks.back().owns_lock();
      rank->queue.Refresh();
    }
    if (!has_all) locks.clear();
    return has_all;
  }));
  return locks;
}

CommunicatorStats StatsOf(const LocalRanks& ranks) {
  CommunicatorStats stats;
  Refresh(ranks);
  stats.in_flight = CountInFlight(ranks);
  for (const auto& rank : ranks) stats.bytes += rank->queue.counts().bytes();
  ranks[0]->queue.counts().AddTo(&stats);
  return stats;
}

}  // namespace jaxcomm
