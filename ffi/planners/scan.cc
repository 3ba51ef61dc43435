#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

void Moves(const Plan& plan, int leaf, int, const MoveVisitor& visit) {
  const int first = plan.reverse ? plan.size - 1 : 0, step = plan.reverse ? -1 : 1;
  const int skipped = plan.exclusive ? 1 : 0;
  Move move;
  move.leaf = leaf;
  move.running = true;
  move.sources = Ranks::Range(first, plan.size - skipped, step);
  move.targets = Ranks::Range(first + skipped * step, plan.size - skipped, step);
  move.inner = plan.leaves[leaf].inner;
  if (plan.exclusive) {
    Move fill;
    fill.leaf = leaf;
    fill.identity = true;
    fill.targets = Ranks::One(first);
    fill.inner = move.inner;
    visit(fill);
  }
  if (!move.sources.empty()) visit(move);
}

// Rank r receives the reduction of the operands of ranks 0 .. r; exclusive:
// 0 .. r-1, and the first rank the identity. Reversed, ranks count from the
// last. Parameters: {exclusive, reverse}.
Status MakePlan(const Problem& problem, const void* const* const*, Plan* plan) {
  RETURN_IF_ERROR(CheckProblem(problem, 2));
  plan->exclusive = problem.params[0] != 0;
  plan->reverse = problem.params[1] != 0;
  return KeepLeavesWhole(problem, plan);
}

}  // namespace

const Collective kScan = {Plan::Kind::kScan, MakePlan, Moves};

}  // namespace jaxcomm
