#include <algorithm>

#include "ffi/handlers/collectives.h"

namespace jaxcomm {

// Rank r receives the reduction of the operands of ranks 0 .. r; exclusive:
// 0 .. r-1, and the first rank the identity. Reversed, ranks count from the
// last. Parameters: {exclusive, reverse}.
Status PlanScan(const Problem& problem, const void* const* const*, Plan* plan) {
  const bool exclusive = problem.params[0] != 0;
  std::vector<int> order = AllRanks(problem.size);
  if (problem.params[1] != 0) std::reverse(order.begin(), order.end());
  for (int leaf = 0; leaf < static_cast<int>(problem.operands.size()); ++leaf) {
    Move move;
    move.leaf = leaf;
    move.running = true;
    move.sources = order;
    move.targets = order;
    move.inner = problem.operands[leaf].elements;
    if (exclusive) {
      Move fill;
      fill.leaf = leaf;
      fill.identity = true;
      fill.targets = {order.front()};
      fill.inner = move.inner;
      plan->moves.push_back(std::move(fill));
      move.sources.pop_back();
      move.targets.erase(move.targets.begin());
    }
    if (!move.sources.empty()) plan->moves.push_back(std::move(move));
  }
  return OkStatus();
}

}  // namespace jaxcomm
