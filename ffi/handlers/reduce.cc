#include "ffi/handlers/collectives.h"

namespace jaxcomm {

// result = reduction of every rank's operand on the root, zero elsewhere.
// Parameters: {root}.
Status PlanReduce(const Problem& problem, const void* const* const*, Plan* plan) {
  const int root = static_cast<int>(problem.params[0]);
  std::vector<int> others = AllRanks(problem.size);
  others.erase(others.begin() + root);
  for (int leaf = 0; leaf < static_cast<int>(problem.operands.size()); ++leaf) {
    Move reduce;
    reduce.leaf = leaf;
    reduce.sources = AllRanks(problem.size);
    reduce.targets = {root};
    reduce.inner = problem.operands[leaf].elements;
    plan->moves.push_back(reduce);
    Move fill;
    fill.leaf = leaf;
    fill.targets = others;
    fill.inner = reduce.inner;
    plan->moves.push_back(std::move(fill));
  }
  return OkStatus();
}

}  // namespace jaxcomm
