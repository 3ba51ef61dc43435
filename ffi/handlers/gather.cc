#include "ffi/handlers/collectives.h"

namespace jaxcomm {

// The root receives every operand, the others zeros. Operands are
// [outer, inner], results [outer, size, inner]. Parameters: {root, outer of
// each leaf}.
Status PlanGather(const Problem& problem, const void* const* const*, Plan* plan) {
  plan->pairwise = true;
  const int root = static_cast<int>(problem.params[0]);
  for (int leaf = 0; leaf < static_cast<int>(problem.operands.size()); ++leaf) {
    const int64_t outer = problem.params[1 + leaf];
    const int64_t inner = outer ? problem.operands[leaf].elements / outer : 0;
    for (int rank = 0; rank < problem.size; ++rank) {
      Move move;
      move.leaf = leaf;
      move.sources = {rank};
      move.targets = {root};
      move.outer = outer;
      move.inner = inner;
      move.from = {0, inner, 0};
      move.to = {rank * inner, problem.size * inner, 0};
      plan->moves.push_back(std::move(move));
      if (rank == root) continue;
      Move fill;
      fill.leaf = leaf;
      fill.targets = {rank};
      fill.inner = problem.results[leaf].elements;
      plan->moves.push_back(std::move(fill));
    }
  }
  return OkStatus();
}

}  // namespace jaxcomm
