#include <cstdint>

#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

// Nothing moves. Each rank says the number of its step, as int32. Refuses the call on
// all ranks if they differ. Results are the operands, aliased. No parameters.
Status MakePlan(const Problem& problem, const void* const* const* operands_of, Plan*) {
  Plan whole;
  RETURN_IF_ERROR(CheckProblem(problem, 0));
  RETURN_IF_ERROR(KeepLeavesWhole(problem, &whole));
  for (size_t i = 0; i < problem.operands.size(); ++i) {
    if (problem.operands[i].dtype != DataType::S32) {
      return InvalidArgument("numbers of steps are int32");
    }
    const auto step = [&](int rank, int64_t at) {
      return static_cast<const int32_t*>(operands_of[rank][i])[at];
    };
    for (int rank = 1; rank < problem.size; ++rank) {
      for (int64_t at = 0; at < problem.operands[i].elements; ++at) {
        if (step(rank, at) == step(0, at)) continue;
        return InvalidArgument(
            "ranks are in different steps: rank 0 is in step ", step(0, at),
            ", and rank ", rank, " in step ", step(rank, at),
            ". One of them has left out a step, or taken it twice: agree on the step "
            "to go on from");
      }
    }
  }
  return OkStatus();
}

}  // namespace

const Collective kCheckStep = {Plan::Kind::kCheckStep, MakePlan, nullptr,
                               /*pairwise=*/false, /*plan_reads_operands_from=*/0};

}  // namespace jaxcomm
