#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

void Moves(const Plan& plan, int leaf, int, const MoveVisitor& visit) {
  Move move;
  move.leaf = leaf;
  move.sources = Ranks::All(plan.size);
  move.targets = Ranks::All(plan.size);
  move.inner = plan.leaves[leaf].inner;
  visit(move);
}

}  // namespace

// result = reduction of every rank's operand. No parameters.
Status PlanAllReduce(const Problem& problem, const void* const* const*, Plan* plan) {
  plan->kind = Plan::Kind::kAllReduce;
  plan->expansion = Moves;
  RETURN_IF_ERROR(CheckProblem(problem, 0));
  return KeepLeavesWhole(problem, plan);
}

}  // namespace jaxcomm
