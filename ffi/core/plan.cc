#include "ffi/core/plan.h"

#include <algorithm>

namespace jaxcomm {

bool Ranks::Contains(int rank) const {
  if (list_ != nullptr) return std::find(list_, list_ + count_, rank) != list_ + count_;
  const int index = (rank - first_) * step_;  // a step is 1 or -1
  return index >= 0 && index < count_;
}

std::vector<int> Move::Involved() const {
  std::vector<int> involved;
  for (int rank : targets) involved.push_back(rank);
  for (int rank : sources) {
    if (!targets.Contains(rank)) involved.push_back(rank);
  }
  return involved;
}

void Plan::ForEachMove(int leaf, int rank, const MoveVisitor& visit) const {
  if (rank == kEveryRank) {
    expansion(*this, leaf, rank, visit);
    return;
  }
  expansion(*this, leaf, rank, [&](const Move& move) {
    if (move.targets.Contains(rank) || move.sources.Contains(rank)) visit(move);
  });
}

std::string_view KindName(Plan::Kind kind) {
  static constexpr std::string_view kNames[Plan::kKinds] = {
      "all_gather",      "all_reduce",     "all_to_all", "barrier", "broadcast",
      "check_positions", "check_step",     "gather",     "permute", "ragged_all_to_all",
      "reduce",          "reduce_scatter", "scan",       "scatter",
  };
  return kNames[static_cast<int>(kind)];
}

}  // namespace jaxcomm
