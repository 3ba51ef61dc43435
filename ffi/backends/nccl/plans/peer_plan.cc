#include "ffi/backends/nccl/plans/peer_plan.h"

#include <algorithm>
#include <utility>

#include "ffi/backends/nccl/plans/engine_choice.h"

namespace jaxcomm {

void AddOnce(std::vector<int>& ranks, int rank) {
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
}

namespace {

int64_t BytesSent(const Steps& steps) {
  int64_t bytes = 0;
  for (const Step& step : steps.grouped) {
    if (step.kind == Step::Kind::kSend) bytes += step.bytes();
  }
  return bytes;
}

}  // namespace

bool CopiesServe(Plan::Kind kind) {
  switch (kind) {
    case Plan::Kind::kBarrier:
    case Plan::Kind::kBroadcast:
    case Plan::Kind::kCheckPositions:
    case Plan::Kind::kCheckStep:
    case Plan::Kind::kAllReduce:
    case Plan::Kind::kReduce:
    case Plan::Kind::kReduceScatter:
    case Plan::Kind::kScan:
      return false;
    default:
      return true;
  }
}

PeerPlan MakePeerPlan(const CallSite& site, const Plan& plan) {
  PeerPlan made;
  if (!CopiesServe(plan.kind)) return made;
  made.moves_along_pairs = plan.kind == Plan::Kind::kPermute;
  const int size = plan.size;
  std::vector<Steps> steps(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    auto made_steps = MakeStridedSteps(site, plan, rank);
    if (!made_steps) return {};
    const Steps& own = steps[rank] = std::move(*made_steps);
    for (const Step& step : own.grouped) {
      if (step.kind != Step::Kind::kSend && step.kind != Step::Kind::kRecv) return {};
    }
    made.bytes_sent = std::max(made.bytes_sent, BytesSent(own));
    made.copies = std::max(made.copies,
                           static_cast<int64_t>(own.grouped.size() + own.local.size()));
  }
  const bool is_gather = plan.kind == Plan::Kind::kAllGather;
  const int64_t least_of_copy = is_gather ? kLeastBytesOfGathered : kLeastBytesOfCopy;
  if (made.bytes_sent < std::max(kLeastBytesOfMore, made.copies * least_of_copy)) {
    return made;
  }
  made.parts.resize(steps.size());
  for (int rank = 0; rank < size; ++rank) {
    made.parts[rank].local = std::move(steps[rank].local);
    // Each begins with another target, so that no two send to one at a time.
    for (int distance = 1; distance < size; ++distance) {
      const int target = (rank + distance) % size;
      for (const Step& step : steps[rank].grouped) {
        if (step.kind != Step::Kind::kSend || step.peer != target) continue;
        made.parts[rank].copies.push_back(step);
      }
    }
    for (const Step& copy : made.parts[rank].copies) {
      AddOnce(made.parts[rank].targets, copy.peer);
      AddOnce(made.parts[copy.peer].sources, rank);
    }
  }
  made.leaves = plan.leaves;
  return made;
}

}  // namespace jaxcomm
