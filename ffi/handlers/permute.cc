#include "ffi/handlers/collectives.h"

namespace jaxcomm {

// Each rank receives the operand of one other, or zeros. Parameters: {source of
// each rank, -1 for none}.
Status PlanPermute(const Problem& problem, const void* const* const*, Plan* plan) {
  plan->pairwise = true;
  if (static_cast<int>(problem.params.size()) != problem.size) {
    return InvalidArgument("a permutation of ", problem.params.size(),
                           " ranks was given to a group of ", problem.size);
  }
  for (int leaf = 0; leaf < static_cast<int>(problem.operands.size()); ++leaf) {
    for (int rank = 0; rank < problem.size; ++rank) {
      Move move;
      move.leaf = leaf;
      const int source = static_cast<int>(problem.params[rank]);
      if (source >= 0) move.sources = {source};
      move.targets = {rank};
      move.inner = problem.operands[leaf].elements;
      plan->moves.push_back(std::move(move));
    }
  }
  return OkStatus();
}

}  // namespace jaxcomm
