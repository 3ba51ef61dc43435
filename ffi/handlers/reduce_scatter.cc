#include "ffi/handlers/collectives.h"

namespace jaxcomm {

// Rank r receives the reduction of slice r. Operands are [outer, size, inner],
// results [outer, inner]. Parameters: {outer of each leaf}.
Status PlanReduceScatter(const Problem& problem, const void* const* const*,
                         Plan* plan) {
  const std::vector<int> all = AllRanks(problem.size);
  for (int leaf = 0; leaf < static_cast<int>(problem.results.size()); ++leaf) {
    const int64_t outer = problem.params[leaf];
    const int64_t inner = outer ? problem.results[leaf].elements / outer : 0;
    for (int rank : all) {
      Move move;
      move.leaf = leaf;
      move.sources = all;
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
