// What planners check: parameters and shapes are data, and may come from elsewhere.
#ifndef JAXCOMM_FFI_PLANNERS_PROBLEM_H_
#define JAXCOMM_FFI_PLANNERS_PROBLEM_H_

#include <cstddef>

#include "ffi/base/status.h"
#include "ffi/core/plan.h"

namespace jaxcomm {

// Fails unless the collective has so many parameters, and as many
// operands as results, of the same types.
Status CheckProblem(const Problem& problem, size_t params);
// Returns parameter `index`. Fails unless it is a rank of the group.
ErrorOr<int> ReadRank(const Problem& problem, size_t index);
// Divides every leaf into parts of [outer, inner], one for a rank. Parameter
// `first` + i is the outer of leaf i. An operand holds `operand_parts` of the parts, a
// result `result_parts`.
Status DivideLeaves(const Problem& problem, size_t first, int operand_parts,
                    int result_parts, Plan* plan);
// Keeps every leaf whole: a rank's part is all of it.
Status KeepLeavesWhole(const Problem& problem, Plan* plan);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_PLANNERS_PROBLEM_H_
