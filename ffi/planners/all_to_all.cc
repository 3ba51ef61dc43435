#include <algorithm>

#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

void Moves(const Plan& plan, int leaf, int rank, const MoveVisitor& visit) {
  const int size = plan.size;
  const Plan::Division& division = plan.leaves[leaf];
  const int64_t middle = division.middle, inner = division.inner;
  // The two ways in which a buffer can hold the marked axis.
  const auto before_middle = [&](int place) {
    return Strides{place * middle * inner, size * middle * inner, inner};
  };
  const auto after_middle = [&](int place) {
    return Strides{place * inner, middle * size * inner, size * inner};
  };
  Move move;
  move.leaf = leaf;
  move.outer = division.outer;
  move.middle = middle;
  move.inner = inner;
  for (int target = 0; target < size; ++target) {
    const auto visit_from = [&](int source) {
      move.sources = Ranks::One(source);
      move.targets = Ranks::One(target);
      move.from = division.split_first ? before_middle(target) : after_middle(target);
      move.to = division.split_first ? after_middle(source) : before_middle(source);
      visit(move);
    };
    if (rank != Plan::kEveryRank && rank != target) {
      visit_from(rank);
      continue;
    }
    for (int step = 0; step < size; ++step) visit_from((target + step) % size);
  }
}

Status GiveRooms(const Problem& problem, Plan* plan) {
  size_t next = problem.operands.size();
  if (problem.results.size() == next) return OkStatus();
  for (size_t leaf = 0; leaf < plan->leaves.size(); ++leaf) {
    const bool is_empty = problem.operands[leaf].elements == 0;
    if (is_empty || plan->IsContiguous(static_cast<int>(leaf))) continue;
    if (next >= problem.results.size() ||
        problem.results[next].bytes() != problem.operands[leaf].bytes()) {
      return InvalidArgument("leaf ", leaf, " has no room of its size");
    }
    plan->leaves[leaf].room = static_cast<int>(next++);
  }
  if (next == problem.results.size()) return OkStatus();
  return InvalidArgument("it has ", problem.results.size(), " results, not ", next);
}

// Rank s's slice r goes to rank r's place s. Parameters: three numbers a leaf,
// {outer, middle, split_first}, with r and s counting along the marked axis of
//   split_first = 1   operand [outer, r, middle, inner] -> [outer, middle, s, inner]
//   split_first = 0   operand [outer, middle, r, inner] -> [outer, s, middle, inner]
// There may be more results than operands: then there is one more for each leaf that
// has elements and is not contiguous, of its size, without meaning. See Division::room.
Status MakePlan(const Problem& problem, const void* const* const*, Plan* plan) {
  const size_t leaves = problem.operands.size();
  const std::vector<Leaf>& all = problem.results;
  const std::vector<Leaf> results(all.begin(),
                                  all.begin() + std::min(leaves, all.size()));
  RETURN_IF_ERROR(CheckProblem(
      {problem.size, problem.operands, results, problem.params}, 3 * leaves));
  plan->leaves.reserve(leaves);
  for (size_t leaf = 0; leaf < leaves; ++leaf) {
    const int64_t* params = &problem.params[3 * leaf];
    Plan::Division division;
    division.outer = params[0];
    division.middle = params[1];
    division.split_first = params[2] != 0;
    const int64_t elements = problem.operands[leaf].elements;
    bool fits = problem.results[leaf].elements == elements;
    division.inner = elements;
    for (int64_t parts : {int64_t{problem.size}, division.outer, division.middle}) {
      fits = fits && parts >= 0 &&
             (parts == 0 ? elements == 0 : division.inner % parts == 0);
      division.inner = fits && parts > 0 ? division.inner / parts : 0;
    }
    if (!fits) {
      return InvalidArgument(
          "leaf ", leaf, ": an operand of ", elements, " elements and a result of ",
          problem.results[leaf].elements, " do not divide into ", division.outer, " x ",
          division.middle, " rows for each of ", problem.size, " ranks");
    }
    // Any number of rows divides an empty leaf. It has none: products stay in range.
    if (elements == 0) division.outer = division.middle = 0;
    plan->leaves.push_back(division);
  }
  return GiveRooms(problem, plan);
}

}  // namespace

const Collective kAllToAll = {Plan::Kind::kAllToAll, MakePlan, Moves};

}  // namespace jaxcomm
