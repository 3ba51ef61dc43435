#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

void Moves(const Plan& plan, int leaf, int, const MoveVisitor& visit) {
  const int64_t outer = plan.leaves[leaf].outer, inner = plan.leaves[leaf].inner;
  for (int rank = 0; rank < plan.size; ++rank) {
    Move move;
    move.leaf = leaf;
    move.sources = Ranks::One(rank);
    move.targets = Ranks::One(plan.root);
    move.outer = outer;
    move.inner = inner;
    move.from = {0, inner, 0};
    move.to = {rank * inner, plan.size * inner, 0};
    visit(move);
    if (rank == plan.root) continue;
    Move fill;
    fill.leaf = leaf;
    fill.targets = Ranks::One(rank);
    fill.inner = outer * plan.size * inner;
    visit(fill);
  }
}

// The root receives every operand, the others zeros. Operands are
// [outer, inner], results [outer, size, inner]. Parameters: {root, outer of
// each leaf}.
Status MakePlan(const Problem& problem, const void* const* const*, Plan* plan) {
  RETURN_IF_ERROR(CheckProblem(problem, 1 + problem.operands.size()));
  ASSIGN_OR_RETURN(plan->root, ReadRank(problem, 0));
  return DivideLeaves(problem, 1, 1, problem.size, plan);
}

}  // namespace

const Collective kGather = {Plan::Kind::kGather, MakePlan, Moves, /*pairwise=*/true};

}  // namespace jaxcomm
