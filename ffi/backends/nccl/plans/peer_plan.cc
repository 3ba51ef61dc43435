#include "ffi/backends/nccl/plans/peer_plan.h"

#include <algorithm>
#include <utility>

#include "ffi/backends/nccl/plans/engine_choice.h"

namespace jaxcomm {
namespace {

void AddOnce(std::vector<int>& ranks, int rank) {
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
}

int64_t BytesSent(const Steps& steps) {
  int64_t bytes = 0;
  for (const Step& step : steps.grouped) {
    if (step.kind == Step::Kind::kSend) bytes += static_cast<int64_t>(step.count);
  }
  return bytes;
}

// Pairs a rank's sends to another with the other's receives, which are in one order.
void Pair(const Steps& from, const Steps& to, int source, int target,
          std::vector<PeerPlan::Copy>* copies) {
  auto receive = to.grouped.begin();
  for (const Step& send : from.grouped) {
    if (send.kind != Step::Kind::kSend || send.peer != target) continue;
    receive = std::find_if(receive, to.grouped.end(), [source](const Step& step) {
      return step.kind == Step::Kind::kRecv && step.peer == source;
    });
    copies->push_back({target, send.leaf, send.from, receive->to, send.count});
    ++receive;
  }
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
  const int size = plan.size;
  std::vector<Steps> steps(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    auto made_steps = MakeSteps(site, plan, rank, Natives::kNone);
    if (!made_steps) return {};
    const Steps& own = steps[rank] = std::move(*made_steps);
    for (const Step& step : own.grouped) {
      if (step.kind != Step::Kind::kSend && step.kind != Step::Kind::kRecv) return {};
    }
    made.bytes_sent = std::max(made.bytes_sent, BytesSent(own));
    made.copies = std::max(made.copies,
                           static_cast<int64_t>(own.grouped.size() + own.local.size()));
  }
  if (!IsWorthCopying(made.bytes_sent, made.copies, /*is_start=*/true)) return made;
  made.parts.resize(steps.size());
  for (int rank = 0; rank < size; ++rank) {
    made.parts[rank].local = std::move(steps[rank].local);
    // Each begins with another target, so that no two send to one at a time.
    for (int distance = 1; distance < size; ++distance) {
      const int target = (rank + distance) % size;
      Pair(steps[rank], steps[target], rank, target, &made.parts[rank].copies);
    }
    for (const PeerPlan::Copy& copy : made.parts[rank].copies) {
      AddOnce(made.parts[rank].targets, copy.target);
      AddOnce(made.parts[copy.target].sources, rank);
    }
  }
  return made;
}

}  // namespace jaxcomm
