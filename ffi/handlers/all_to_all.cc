#include "ffi/handlers/collectives.h"

namespace jaxcomm {

// Rank s's slice r goes to rank r's place s. Parameters: three numbers a leaf,
// {outer, middle, split_first}, with r and s counting along the marked axis of
//   split_first = 1   operand [outer, r, middle, inner] -> [outer, middle, s, inner]
//   split_first = 0   operand [outer, middle, r, inner] -> [outer, s, middle, inner]
Status PlanAllToAll(const Problem& problem, const void* const* const*, Plan* plan) {
  const int size = problem.size;
  for (int leaf = 0; leaf < static_cast<int>(problem.operands.size()); ++leaf) {
    const int64_t outer = problem.params[3 * leaf];
    const int64_t middle = problem.params[3 * leaf + 1];
    const bool split_first = problem.params[3 * leaf + 2] != 0;
    const int64_t rows = outer * middle * size;
    const int64_t inner = rows ? problem.operands[leaf].elements / rows : 0;
    // The two ways a buffer can hold the marked axis.
    auto before_middle = [&](int rank) {
      return Strides{rank * middle * inner, size * middle * inner, inner};
    };
    auto after_middle = [&](int rank) {
      return Strides{rank * inner, middle * size * inner, size * inner};
    };
    for (int target = 0; target < size; ++target) {
      for (int step = 0; step < size; ++step) {
        const int source = (target + step) % size;
        Move move;
        move.leaf = leaf;
        move.sources = {source};
        move.targets = {target};
        move.outer = outer;
        move.middle = middle;
        move.inner = inner;
        move.from = split_first ? before_middle(target) : after_middle(target);
        move.to = split_first ? after_middle(source) : before_middle(source);
        plan->moves.push_back(std::move(move));
      }
    }
  }
  return OkStatus();
}

}  // namespace jaxcomm
