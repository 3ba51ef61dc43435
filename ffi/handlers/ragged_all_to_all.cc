#include "ffi/handlers/collectives.h"

namespace jaxcomm {
namespace {

enum Operand { kData, kOutput, kInputOffsets, kSendSizes, kOutputOffsets, kRecvSizes };

int64_t ReadIndex(const Leaf& leaf, const void* data, int64_t i) {
  switch (leaf.dtype) {
    case DataType::S8:
      return static_cast<const int8_t*>(data)[i];
    case DataType::S16:
      return static_cast<const int16_t*>(data)[i];
    case DataType::S32:
      return static_cast<const int32_t*>(data)[i];
    case DataType::S64:
      return static_cast<const int64_t*>(data)[i];
    case DataType::U8:
      return static_cast<const uint8_t*>(data)[i];
    case DataType::U16:
      return static_cast<const uint16_t*>(data)[i];
    case DataType::U32:
      return static_cast<const uint32_t*>(data)[i];
    default:
      return static_cast<const int64_t*>(data)[i];
  }
}

}  // namespace

// Slice i of rank s, operand[input_offsets[i] :][: send_sizes[i]], goes to rank
// i / (K / size), to result[output_offsets[i] :]. The result is the operand
// `output` updated in place. No parameters.
Status PlanRaggedAllToAll(const Problem& problem, const void* const* const* operands_of,
                          Plan* plan) {
  const auto& leaves = problem.operands;
  const int64_t slices = leaves[kInputOffsets].elements;
  const int64_t slices_per_rank = slices / problem.size;
  const auto leading = [&](Operand operand) { return leaves[operand].dims[0]; };
  const int64_t row =
      leading(kOutput) ? leaves[kOutput].elements / leading(kOutput) : 0;
  for (int source = 0; source < problem.size; ++source) {
    const auto index = [&](Operand operand, int rank, int64_t i) {
      return ReadIndex(leaves[operand], operands_of[rank][operand], i);
    };
    for (int64_t slice = 0; slice < slices; ++slice) {
      const int target = static_cast<int>(slice / slices_per_rank);
      const int64_t from = index(kInputOffsets, source, slice);
      const int64_t rows = index(kSendSizes, source, slice);
      const int64_t to = index(kOutputOffsets, source, slice);
      const int64_t expected =
          index(kRecvSizes, target, source * slices_per_rank + slice % slices_per_rank);
      if (rows != expected) {
        return InvalidArgument("rank ", source, " sends ", rows, " rows to rank ",
                               target, ", which expects ", expected,
                               "; recv_sizes must be all_to_all(send_sizes)");
      }
      // Without sums, which may overflow.
      if (rows < 0 || from < 0 || to < 0 || rows > leading(kData) ||
          rows > leading(kOutput) || from > leading(kData) - rows ||
          to > leading(kOutput) - rows) {
        return InvalidArgument("slice ", slice, " of rank ", source, " takes ", rows,
                               " rows from row ", from, " on of an operand with ",
                               leading(kData), " rows to row ", to,
                               " on of an output with ", leading(kOutput), " rows");
      }
      if (rows == 0) continue;
      Move move;
      move.sources = {source};
      move.targets = {target};
      move.inner = rows * row;
      move.from.offset = from * row;
      move.to.offset = to * row;
      plan->moves.push_back(std::move(move));
    }
  }
  return OkStatus();
}

}  // namespace jaxcomm
