#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

void Moves(const Plan& plan, int leaf, int, const MoveVisitor& visit) {
  const int64_t outer = plan.leaves[leaf].outer, inner = plan.leaves[leaf].inner;
  Move move;
  move.leaf = leaf;
  move.sources = Ranks::All(plan.size);
  move.outer = outer;
  move.inner = inner;
  move.to = {0, inner, 0};
  for (int rank = 0; rank < plan.size; ++rank) {
    move.targets = Ranks::One(rank);
    move.from = {rank * inner, plan.size * inner, 0};
    visit(move);
  }
}

}  // namespace

// Rank r receives the reduction of slice r. Operands are [outer, size, inner],
// results [outer, inner]. Parameters: {outer of each leaf}.
Status PlanReduceScatter(const Problem& problem, const void* const* const*,
                         Plan* plan) {
  plan->kind = Plan::Kind::kReduceScatter;
  plan->expansion = Moves;
  RETURN_IF_ERROR(CheckProblem(problem, problem.operands.size()));
  return DivideLeaves(problem, 0, problem.size, 1, plan);
}

}  // namespace jaxcomm
