#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

enum Operand {
  kData,
  kOutput,
  kInputOffsets,
  kSendSizes,
  kOutputOffsets,
  kRecvSizes,
  kNumOperands
};

template <typename T>
int64_t At(const void* data, int64_t i) {
  const T value = static_cast<const T*>(data)[i];
  return value > T{0} && static_cast<uint64_t>(value) > uint64_t{INT64_MAX}
             ? INT64_MAX
             : static_cast<int64_t>(value);
}

struct IndexType {
  DataType dtype;
  int64_t (*at)(const void* data, int64_t i);
};

constexpr IndexType kIndexTypes[] = {
    {DataType::S8, At<int8_t>},    {DataType::S16, At<int16_t>},
    {DataType::S32, At<int32_t>},  {DataType::S64, At<int64_t>},
    {DataType::U8, At<uint8_t>},   {DataType::U16, At<uint16_t>},
    {DataType::U32, At<uint32_t>}, {DataType::U64, At<uint64_t>},
};

// Null if the type is no integer.
const IndexType* FindIndexType(DataType dtype) {
  for (const IndexType& type : kIndexTypes) {
    if (type.dtype == dtype) return &type;
  }
  return nullptr;
}

int64_t RowsOf(const Leaf& leaf) { return leaf.dims[0]; }

int64_t RowElements(const Leaf& leaf) {
  return RowsOf(leaf) == 0 ? 0 : leaf.elements / RowsOf(leaf);
}

Status CheckShapes(const Problem& problem) {
  const auto& leaves = problem.operands;
  if (leaves.size() != kNumOperands || problem.results.size() != 1 ||
      !problem.params.empty()) {
    return InvalidArgument("it has ", leaves.size(), " operands, ",
                           problem.results.size(), " results and ",
                           problem.params.size(), " parameters, not ", +kNumOperands,
                           ", 1 and none");
  }
  const Leaf &data = leaves[kData], &output = leaves[kOutput];
  if (data.dims.empty() || output.dims.empty() || data.dtype != output.dtype ||
      problem.results[0].dtype != output.dtype ||
      problem.results[0].elements != output.elements ||
      (data.elements > 0 && output.elements > 0 &&
       RowElements(data) != RowElements(output))) {
    return InvalidArgument("operand, output and result are not rows of one kind");
  }
  const int64_t slices = leaves[kInputOffsets].elements;
  for (int operand = kInputOffsets; operand < kNumOperands; ++operand) {
    if (FindIndexType(leaves[operand].dtype) == nullptr ||
        leaves[operand].elements != slices) {
      return InvalidArgument("offsets and sizes are not ", slices, " integers each");
    }
  }
  if (problem.size < 1 || slices == 0 || slices % problem.size != 0) {
    return InvalidArgument("there are ", slices, " slices for ", problem.size,
                           " ranks; each must get as many, and at least one");
  }
  return OkStatus();
}

// A slice of some rows, as its receiver sees it.
struct Arrival {
  int target;
  int64_t first, rows;
  int source;
  int64_t slice;
};

// Which of two slices would a row keep? In jax.lax the answer is undefined.
Status CheckDisjoint(std::vector<Arrival> arrivals) {
  std::sort(arrivals.begin(), arrivals.end(), [](const Arrival& a, const Arrival& b) {
    return std::tie(a.target, a.first, a.source, a.slice) <
           std::tie(b.target, b.first, b.source, b.slice);
  });
  for (size_t i = 1; i < arrivals.size(); ++i) {
    const Arrival &one = arrivals[i - 1], &next = arrivals[i];
    if (one.target != next.target || one.first + one.rows <= next.first) continue;
    return InvalidArgument(
        "slice ", one.slice, " of rank ", one.source, " (", one.rows,
        " rows) and slice ", next.slice, " of rank ", next.source, " (", next.rows,
        " rows) overlap in the output of rank ", one.target, ", from row ", next.first,
        " on. output_offsets say where a slice begins in its receiver's output: "
        "exchange the receivers' offsets by all_to_all. In a gradient, several slices "
        "hold this row of `operand`: send copies of it");
  }
  return OkStatus();
}

void Moves(const Plan& plan, int leaf, int rank, const MoveVisitor& visit) {
  Move move;
  move.leaf = leaf;
  for (const Plan::Slice& slice : plan.slices) {
    if (rank != Plan::kEveryRank && rank != slice.source && rank != slice.target) {
      continue;
    }
    move.sources = Ranks::One(slice.source);
    move.targets = Ranks::One(slice.target);
    move.inner = slice.elements;
    move.from.offset = slice.from;
    move.to.offset = slice.to;
    visit(move);
  }
}

// Slice i of rank s, operand[input_offsets[i] :][: send_sizes[i]], goes to rank
// i / (K / size), to result[output_offsets[i] :]. The result is the operand
// `output` updated in place. No parameters.
Status MakePlan(const Problem& problem, const void* const* const* operands_of,
                Plan* plan) {
  RETURN_IF_ERROR(CheckShapes(problem));
  plan->leaves.resize(1);  // divided by the slices alone
  const auto& leaves = problem.operands;
  const int64_t slices = leaves[kInputOffsets].elements;
  const int64_t slices_per_rank = slices / problem.size;
  const int64_t data_rows = RowsOf(leaves[kData]);
  const int64_t output_rows = RowsOf(leaves[kOutput]);
  const int64_t row = RowElements(leaves[kOutput]);
  plan->slices.reserve(problem.size * slices);
  std::vector<Arrival> arrivals;
  for (int source = 0; source < problem.size; ++source) {
    const auto index = [&](Operand operand, int rank, int64_t i) {
      return FindIndexType(leaves[operand].dtype)->at(operands_of[rank][operand], i);
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
      // No sums: they may overflow.
      if (rows < 0 || from < 0 || to < 0 || rows > data_rows || rows > output_rows ||
          from > data_rows - rows || to > output_rows - rows) {
        return InvalidArgument("slice ", slice, " of rank ", source, " takes ", rows,
                               " rows from row ", from, " on of an operand with ",
                               data_rows, " rows to row ", to, " on of an output with ",
                               output_rows, " rows");
      }
      if (rows == 0) continue;
      plan->slices.push_back({source, target, from * row, to * row, rows * row});
      arrivals.push_back({target, to, rows, source, slice});
    }
  }
  return CheckDisjoint(std::move(arrivals));
}

}  // namespace

const Collective kRaggedAllToAll = {Plan::Kind::kRaggedAllToAll, MakePlan, Moves,
                                    /*pairwise=*/false, /*plan_reads_operands_from=*/2};

}  // namespace jaxcomm
