#include "ffi/backends/nccl/local_rank.h"

namespace jaxcomm {

CommunicatorStats StatsOf(const LocalRanks& ranks) {
  CommunicatorStats stats;
  for (const auto& rank : ranks) {
    rank->queue.Refresh();
    stats.in_flight += rank->queue.size();
    stats.bytes += rank->queue.counts().bytes();
  }
  ranks[0]->queue.counts().AddTo(&stats);
  return stats;
}

}  // namespace jaxcomm
