#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

void Moves(const Plan& plan, int leaf, int, const MoveVisitor& visit) {
  const int64_t outer = plan.leaves[leaf].outer, inner = plan.leaves[leaf].inner;
  Move move;
  move.leaf = leaf;
  move.targets = Ranks::All(plan.size);
  move.outer = outer;
  move.inner = inner;
  move.from = {0, inner, 0};
  for (int source = 0; source < plan.size; ++source) {
    move.sources = Ranks::One(source);
    move.to = {source * inner, plan.size * inner, 0};
    visit(move);
  }
}

// Every rank receives every operand. Operands are [outer, inner], results
// [outer, size, inner]. Parameters: {outer of each leaf}.
Status MakePlan(const Problem& problem, const void* const* const*, Plan* plan) {
  RETURN_IF_ERROR(CheckProblem(problem, problem.operands.size()));
  return DivideLeaves(problem, 0, 1, problem.size, plan);
}

}  // namespace

const Collective kAllGather = {Plan::Kind::kAllGather, MakePlan, Moves};

}  // namespace jaxcomm
