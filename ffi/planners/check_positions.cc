#include <cstdint>

#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

// A mistake, as int32: which token, the position that it has, the one it should have.
enum Mistake { kToken, kFound, kExpected, kFields };

// Nothing moves. Each rank says which of its tokens is the first to be out of place, in
// rows of kFields numbers; a negative token for none. Refuses the call on all ranks if
// one of them has such a token. Results are the operands, aliased. No parameters.
Status MakePlan(const Problem& problem, const void* const* const* operands_of, Plan*) {
  Plan whole;
  RETURN_IF_ERROR(CheckProblem(problem, 0));
  RETURN_IF_ERROR(KeepLeavesWhole(problem, &whole));
  for (const Leaf& leaf : problem.operands) {
    if (leaf.dtype != DataType::S32 || leaf.elements % kFields != 0) {
      return InvalidArgument("mistakes are rows of ", +kFields, " int32");
    }
  }
  for (int rank = 0; rank < problem.size; ++rank) {
    for (size_t i = 0; i < problem.operands.size(); ++i) {
      const auto* row = static_cast<const int32_t*>(operands_of[rank][i]);
      const int32_t* const end = row + problem.operands[i].elements;
      for (; row != end; row += kFields) {
        if (row[kToken] < 0) continue;
        return InvalidArgument(
            "rank ", rank, " does not hold the tokens that its layout says: token ",
            row[kToken], " has position ", row[kFound], ", and the layout says ",
            row[kExpected],
            " (-1 is padding). Pass the tokens that came with this batch: "
            "`batch, tokens = layout.reorder(batch)`");
      }
    }
  }
  return OkStatus();
}

}  // namespace

const Collective kCheckPositions = {Plan::Kind::kCheckPositions, MakePlan, nullptr,
                                    /*pairwise=*/false,
                                    /*plan_reads_operands_from=*/0};

}  // namespace jaxcomm
