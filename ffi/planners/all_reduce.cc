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

// result = reduction of every rank's operand. No parameters.
Status MakePlan(const Problem& problem, const void* const* const*, Plan* plan) {
  RETURN_IF_ERROR(CheckProblem(problem, 0));
  return KeepLeavesWhole(problem, plan);
}

}  // namespace

const Collective kAllReduce = {Plan::Kind::kAllReduce, MakePlan, Moves};

}  // namespace jaxcomm
