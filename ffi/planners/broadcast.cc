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

// Every rank receives the root's operand. Parameters: {root}.
Status MakePlan(const Problem& problem, const void* const* const*, Plan* plan) {
  RETURN_IF_ERROR(CheckProblem(problem, 1));
  ASSIGN_OR_RETURN(plan->root, ReadRank(problem, 0));
  return KeepLeavesWhole(problem, plan);
}

}  // namespace

const Collective kBroadcast = {Plan::Kind::kBroadcast, MakePlan, Moves,
                               /*pairwise=*/true};

}  // namespace jaxcomm
