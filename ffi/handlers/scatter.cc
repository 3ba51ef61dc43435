#include "ffi/handlers/collectives.h"

namespace jaxcomm {

// Rank r receives slice r of the root's operand. Operands are
// [outer, size, inner], results [outer, inner]. Parameters: {root, outer of
// each leaf}.
Status PlanScatter(const Problem& problem, const void* const* const*, Plan* plan) {
  plan->pairwise = true;
  const int root = static_cast<int>(problem.params[0]);
  for (int leaf = 0; leaf < static_cast<int>(problem.results.size()); ++leaf) {
    const int64_t outer = problem.params[1 + leaf];
    const int64_t inner = outer ? problem.results[leaf].elements / outer : 0;
    for (int rank = 0; rank < problem.size; ++rank) {
      Move move;
      move.leaf = leaf;
      move.sources = {root};
      move.targets = {rank};
      move.outer = outer;
      move.inner = inner;
      move.from = {rank * inner, problem.size * inner, 0};
      move.to = {0, inner, 0};
      plan->moves.push_back(std::move(move));
    }
  }
  return OkStatus();
}

}  // namespace jaxcomm
