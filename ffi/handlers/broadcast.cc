#include "ffi/handlers/collectives.h"

namespace jaxcomm {

// Every rank receives the root's operand. Parameters: {root}.
Status PlanBroadcast(const Problem& problem, const void* const* const*, Plan* plan) {
  plan->pairwise = true;
  for (int leaf = 0; leaf < static_cast<int>(problem.operands.size()); ++leaf) {
    for (int rank = 0; rank < problem.size; ++rank) {
      Move move;
      move.leaf = leaf;
      move.sources = {static_cast<int>(problem.params[0])};
      move.targets = {rank};
      move.inner = problem.operands[leaf].elements;
      plan->moves.push_back(std::move(move));
    }
  }
  return OkStatus();
}

}  // namespace jaxcomm
