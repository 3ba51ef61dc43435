#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

void Moves(const Plan& plan, int leaf, int, const MoveVisitor& visit) {
  Move move;
  move.leaf = leaf;
  move.inner = plan.leaves[leaf].inner;
  for (int rank = 0; rank < plan.size; ++rank) {
    const int source = plan.source_of[rank];
    move.sources = source >= 0 ? Ranks::One(source) : Ranks();
    move.targets = Ranks::One(rank);
    visit(move);
  }
}

// Each rank receives the operand of one other, or zeros. Parameters: {source of
// each rank, -1 for none}.
Status MakePlan(const Problem& problem, const void* const* const*, Plan* plan) {
  const size_t ranks = problem.params.size();
  if (static_cast<int64_t>(ranks) != problem.size) {
    return InvalidArgument("a permutation of ", ranks,
                           " ranks was given to a group of ", problem.size);
  }
  RETURN_IF_ERROR(CheckProblem(problem, ranks));
  plan->source_of.assign(ranks, -1);
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (problem.params[rank] == -1) continue;
    ASSIGN_OR_RETURN(plan->source_of[rank], ReadRank(problem, rank));
  }
  return KeepLeavesWhole(problem, plan);
}

}  // namespace

const Collective kPermute = {Plan::Kind::kPermute, MakePlan, Moves, /*pairwise=*/true};

}  // namespace jaxcomm
