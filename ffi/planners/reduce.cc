#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

void Moves(const Plan& plan, int leaf, int, const MoveVisitor& visit) {
  Move reduce;
  reduce.leaf = leaf;
  reduce.sources = Ranks::All(plan.size);
  reduce.targets = Ranks::One(plan.root);
  reduce.inner = plan.leaves[leaf].inner;
  visit(reduce);
  const int after = plan.root + 1;
  for (Ranks others : {Ranks::All(plan.root), Ranks::Range(after, plan.size - after)}) {
    if (others.empty()) continue;
    Move fill;
    fill.leaf = leaf;
    fill.targets = others;
    fill.inner = reduce.inner;
    visit(fill);
  }
}

// result = reduction of every rank's operand on the root, zero elsewhere.
// Parameters: {root}.
Status MakePlan(const Problem& problem, const void* const* const*, Plan* plan) {
  RETURN_IF_ERROR(CheckProblem(problem, 1));
  ASSIGN_OR_RETURN(plan->root, ReadRank(problem, 0));
  return KeepLeavesWhole(problem, plan);
}

}  // namespace

const Collective kReduce = {Plan::Kind::kReduce, MakePlan, Moves};

}  // namespace jaxcomm
