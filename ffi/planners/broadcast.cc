#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

void Moves(const Plan& plan, int leaf, int, const MoveVisitor& visit) {
  Move move;
  move.leaf = leaf;
  move.sources = Ranks::One(plan.root);
  move.inner = plan.leaves[leaf].inner;
  for (int rank = 0; rank < plan.size; ++rank) {
    move.targets = Ranks::One(rank);
    visit(move);
  }
}

}  // namespace

// Every rank receives the root's operand. Parameters: {root}.
Status PlanBroadcast(const Problem& problem, const void* const* const*, Plan* plan) {
  plan->kind = Plan::Kind::kBroadcast;
  plan->expansion = Moves;
  plan->pairwise = true;
  RETURN_IF_ERROR(CheckProblem(problem, 1));
  RETURN_IF_ERROR(ReadRank(problem, 0, &plan->root));
  return KeepLeavesWhole(problem, plan);
}

}  // namespace jaxcomm
