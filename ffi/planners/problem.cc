#include "ffi/planners/problem.h"

namespace jaxcomm {

Status CheckProblem(const Problem& problem, size_t params) {
  if (problem.size < 1) {
    return InvalidArgument("a group of ", problem.size, " ranks");
  }
  if (problem.params.size() != params) {
    return InvalidArgument("it has ", problem.params.size(), " parameters, not ",
                           params);
  }
  if (problem.operands.size() != problem.results.size()) {
    return InvalidArgument("it has ", problem.operands.size(), " operands and ",
                           problem.results.size(), " results");
  }
  for (size_t leaf = 0; leaf < problem.operands.size(); ++leaf) {
    if (problem.operands[leaf].dtype != problem.results[leaf].dtype) {
      return InvalidArgument("operand and result ", leaf, " are of different types");
    }
  }
  return OkStatus();
}

ErrorOr<int> ReadRank(const Problem& problem, size_t index) {
  const int64_t found = problem.params[index];
  if (found < 0 || found >= problem.size) {
    return InvalidArgument("rank ", found, " is not one of the group's ", problem.size);
  }
  return static_cast<int>(found);
}

Status DivideLeaves(const Problem& problem, size_t first, int operand_parts,
                    int result_parts, Plan* plan) {
  plan->leaves.reserve(problem.operands.size());
  for (size_t leaf = 0; leaf < problem.operands.size(); ++leaf) {
    const int64_t outer = problem.params[first + leaf];
    const int64_t operand = problem.operands[leaf].elements;
    const int64_t result = problem.results[leaf].elements;
    const int64_t part = operand / operand_parts;
    if (outer < 0 || part * operand_parts != operand || result % result_parts != 0 ||
        result / result_parts != part || (outer == 0 ? part != 0 : part % outer != 0)) {
      return InvalidArgument("leaf ", leaf, ": an operand of ", operand,
                             " elements and a result of ", result,
                             " do not divide into ", operand_parts, " and ",
                             result_parts, " parts of ", outer, " rows");
    }
    Plan::Division division;
    // Any number of rows divides an empty leaf. It has none: products stay in range.
    division.outer = part == 0 ? 0 : outer;
    division.inner = part == 0 ? 0 : part / outer;
    plan->leaves.push_back(division);
  }
  return OkStatus();
}

Status KeepLeavesWhole(const Problem& problem, Plan* plan) {
  plan->leaves.reserve(problem.operands.size());
  for (size_t leaf = 0; leaf < problem.operands.size(); ++leaf) {
    const int64_t elements = problem.operands[leaf].elements;
    if (problem.results[leaf].elements != elements) {
      return InvalidArgument("leaf ", leaf, ": an operand of ", elements,
                             " elements and a result of ",
                             problem.results[leaf].elements);
    }
    Plan::Division division;
    division.inner = elements;
    plan->leaves.push_back(division);
  }
  return OkStatus();
}

}  // namespace jaxcomm
