#include "ffi/backends/host/reduce/host_plan.h"

#include <algorithm>

#include "ffi/backends/host/reduce/reduce.h"
#include "ffi/os/cores.h"

namespace jaxcomm {
namespace {

// One pass over eight inputs in 1 MiB pieces beat XLA on two cores, 32 KiB
// pieces lost; smaller totals are cut finer so that the cores share them.
constexpr int64_t kMaxBlockBytes = 1 << 20;
constexpr int64_t kMinBlockBytes = 64 << 10;
constexpr int64_t kBlocksPerCore = 2;

// How to cut what is moved at a time.
int64_t BlockBytes(int64_t bytes) {
  return std::clamp(bytes / (kBlocksPerCore * Cores()), kMinBlockBytes, kMaxBlockBytes);
}

int64_t RowBytes(const Move& move, const std::vector<Leaf>& leaves) {
  return move.inner * static_cast<int64_t>(leaves[move.leaf].element_bytes);
}

void Cut(const std::vector<Leaf>& leaves, HostPlan* plan) {
  int64_t all_bytes = 0;
  for (const Move& move : plan->moves)
    all_bytes += move.rows() * RowBytes(move, leaves);
  for (int index = 0; index < static_cast<int>(plan->moves.size()); ++index) {
    const Move& move = plan->moves[index];
    plan->all_moves.push_back(index);
    plan->first_block.push_back(static_cast<int>(plan->blocks.size()));
    const int64_t rows = move.rows();
    const int64_t row_bytes = RowBytes(move, leaves);
    if (rows == 0 || row_bytes == 0) continue;
    plan->touched += rows * row_bytes *
                     static_cast<int64_t>(move.sources.size() + move.targets.size());
    const int64_t block_bytes =
        BlockBytes(plan->pairwise ? rows * row_bytes : all_bytes);
    CutMove(move, index, static_cast<int64_t>(leaves[move.leaf].element_bytes),
            block_bytes, 2 * block_bytes - 1, &plan->blocks);
  }
  plan->first_block.push_back(static_cast<int>(plan->blocks.size()));
}

void IndexByRank(HostPlan* plan) {
  plan->moves_of.resize(static_cast<size_t>(plan->size));
  for (int index = 0; index < static_cast<int>(plan->moves.size()); ++index) {
    for (int rank : plan->moves[index].Involved()) {
      plan->moves_of[rank].push_back(index);
    }
  }
}

Status CheckReducible(const CallSite& site, const HostPlan& plan) {
  for (const Move& move : plan.moves) {
    const DataType dtype = site.results()[move.leaf].dtype;
    if (move.needs_kernels() &&
        FindReduceKernels(dtype, site.attributes().reduce).reduce == nullptr) {
      return Status(ErrorCode::kUnimplemented,
                    StrCat(site.ToString(), ": the host backend cannot reduce ",
                           DataTypeName(dtype), "; cast it first"));
    }
  }
  return OkStatus();
}

}  // namespace

void CutMove(const Move& move, int index, int64_t width, int64_t bytes,
             int64_t whole_bytes, std::vector<Block>* blocks) {
  const int64_t rows = move.rows(), row_bytes = move.inner * width;
  if (row_bytes <= whole_bytes) {
    const int64_t step = std::max<int64_t>(1, bytes / row_bytes);
    for (int64_t row = 0; row < rows; row += step) {
      blocks->push_back({index, row, std::min(row + step, rows), 0, move.inner});
    }
    return;
  }
  const int64_t step = std::max<int64_t>(1, bytes / width);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t begin = 0; begin < move.inner; begin += step) {
      blocks->push_back(
          {index, row, row + 1, begin, std::min(begin + step, move.inner)});
    }
  }
}

ErrorOr<HostPlan> MakeHostPlan(const CallSite& site, int size,
                               const void* const* const* operands_of) {
  ASSIGN_OR_RETURN(const Plan plan, site.MakePlan(size, operands_of));
  HostPlan made;
  made.size = size;
  made.pairwise = plan.pairwise;
  for (int leaf = 0; leaf < static_cast<int>(plan.leaves.size()); ++leaf) {
    plan.ForEachMove(leaf, Plan::kEveryRank,
                     [&made](const Move& move) { made.moves.push_back(move); });
  }
  RETURN_IF_ERROR(CheckReducible(site, made));
  Cut(site.results(), &made);
  if (made.pairwise) IndexByRank(&made);
  return made;
}

}  // namespace jaxcomm
