#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

// Rank r receives slice r: of the root's operand, or of the reduction of all operands.
void Moves(const Plan& plan, int leaf, int, const MoveVisitor& visit) {
  const int64_t outer = plan.leaves[leaf].outer, inner = plan.leaves[leaf].inner;
  Move move;
  move.leaf = leaf;
  move.sources =
      plan.kind == Plan::Kind::kScatter ? Ranks::One(plan.root) : Ranks::All(plan.size);
  move.outer = outer;
  move.inner = inner;
  move.to = {0, inner, 0};
  for (int rank = 0; rank < plan.size; ++rank) {
    move.targets = Ranks::One(rank);
    move.from = {rank * inner, plan.size * inner, 0};
    visit(move);
  }
}

// Operands are [outer, size, inner], results [outer, inner]. Parameters: {root, outer
// of each leaf}.
Status PlanScatter(const Problem& problem, const void* const* const*, Plan* plan) {
  RETURN_IF_ERROR(CheckProblem(problem, 1 + problem.operands.size()));
  ASSIGN_OR_RETURN(plan->root, ReadRank(problem, 0));
  return DivideLeaves(problem, 1, problem.size, 1, plan);
}

// The same shapes. Parameters: {outer of each leaf}.
Status PlanReduceScatter(const Problem& problem, const void* const* const*,
                         Plan* plan) {
  RETURN_IF_ERROR(CheckProblem(problem, problem.operands.size()));
  return DivideLeaves(problem, 0, problem.size, 1, plan);
}

}  // namespace

const Collective kScatter = {Plan::Kind::kScatter, PlanScatter, Moves,
                             /*pairwise=*/true};
const Collective kReduceScatter = {Plan::Kind::kReduceScatter, PlanReduceScatter,
                                   Moves};

}  // namespace jaxcomm
