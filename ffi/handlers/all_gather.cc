#include "ffi/handlers/collectives.h"

namespace jaxcomm {

// Every rank receives every operand. Operands are [outer, inner], results
// [outer, size, inner]. Parameters: {outer of each leaf}.
Status PlanAllGather(const Problem& problem, const void* const* const*, Plan* plan) {
  const std::vector<int> all = AllRanks(problem.size);
  for (int leaf = 0; leaf < static_cast<int>(problem.operands.size()); ++leaf) {
    const int64_t outer = problem.params[leaf];
    const int64_t inner = outer ? problem.operands[leaf].elements / outer : 0;
    for (int rank : all) {
      Move move;
      move.leaf = leaf;
      move.sources = {rank};
      move.targets = all;
      move.outer = outer;
      move.inner = inner;
      move.from = {0, inner, 0};
      move.to = {rank * inner, problem.size * inner, 0};
      plan->moves.push_back(std::move(move));
    }
  }
  return OkStatus();
}

}  // namespace jaxcomm
