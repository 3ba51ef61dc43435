#include "ffi/backends/nccl/steps.h"

#include <algorithm>
#include <optional>

namespace jaxcomm {
namespace {

using Kind = Step::Kind;

struct Number {
  nccl::Type type;
  int parts = 1;  // a complex number is two
};

// The type NCCL reduces as which; none if it cannot.
std::optional<Number> NumberOf(DataType dtype, ReduceOp op) {
  switch (dtype) {
    case DataType::S8:
      return Number{nccl::Type::kInt8};
    case DataType::U8:
      return Number{nccl::Type::kUint8};
    case DataType::S32:
      return Number{nccl::Type::kInt32};
    case DataType::U32:
      return Number{nccl::Type::kUint32};
    case DataType::S64:
      return Number{nccl::Type::kInt64};
    case DataType::U64:
      return Number{nccl::Type::kUint64};
    case DataType::F16:
      return Number{nccl::Type::kFloat16};
    case DataType::BF16:
      return Number{nccl::Type::kBfloat16};
    case DataType::F32:
      return Number{nccl::Type::kFloat32};
    case DataType::F64:
      return Number{nccl::Type::kFloat64};
    case DataType::PRED:
      if (op == ReduceOp::kMax || op == ReduceOp::kMin) {
        return Number{nccl::Type::kUint8};
      }
      return std::nullopt;
    case DataType::C64:
      if (op == ReduceOp::kSum) return Number{nccl::Type::kFloat32, 2};
      return std::nullopt;
    case DataType::C128:
      if (op == ReduceOp::kSum) return Number{nccl::Type::kFloat64, 2};
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

nccl::RedOp RedOpOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return nccl::RedOp::kSum;
    case ReduceOp::kProduct:
      return nccl::RedOp::kProd;
    case ReduceOp::kMax:
      return nccl::RedOp::kMax;
    case ReduceOp::kMin:
      return nccl::RedOp::kMin;
    case ReduceOp::kMean:
      return nccl::RedOp::kAvg;
  }
  return nccl::RedOp::kSum;
}

// Joins rows that lie one behind the other on both sides.
Move Joined(Move move) {
  const auto dense = [&](const Strides& strides) {
    return (move.middle == 1 || strides.middle == move.inner) &&
           (move.outer == 1 || strides.outer == move.middle * move.inner);
  };
  if (dense(move.from) && dense(move.to)) {
    move.inner *= move.outer * move.middle;
    move.outer = move.middle = 1;
  }
  return move;
}

class Maker {
 public:
  Maker(const CallSite& site, int size, int rank, Natives natives, Steps* steps)
      : site_(site), size_(size), rank_(rank), natives_(natives), steps_(*steps) {}

  Status AddLeaf(int leaf, const std::vector<Move>& moves) {
    leaf_ = leaf;
    element_bytes_ = static_cast<int64_t>(site_.results()[leaf].element_bytes);
    std::vector<Move> sent, zeros;
    for (const Move& move : moves)
      (move.sources.empty() ? zeros : sent).push_back(move);
    if (!IsOneRowEach(sent) || !AddNative(sent)) {
      for (const Move& move : sent) AddMove(move);
    }
    for (const Move& move : zeros) AddMove(move);
    return status_;
  }

 private:
  static bool IsOneRowEach(const std::vector<Move>& moves) {
    return std::all_of(moves.begin(), moves.end(), [](const Move& move) {
      return move.outer * move.middle == 1 && !move.running;
    });
  }

  bool IsAll(const std::vector<int>& ranks) const {
    return static_cast<int>(ranks.size()) == size_;
  }

  // Whether move number i is `from_all` / to all, or else of rank i alone, and its row
  // lies at i * from_step in the operand and at i * to_step in the result.
  bool IsOneForEachRank(const std::vector<Move>& moves, bool from_all, bool to_all,
                        bool from_steps, bool to_steps) const {
    if (static_cast<int>(moves.size()) != size_) return false;
    for (int i = 0; i < size_; ++i) {
      const Move& move = moves[i];
      const int64_t step = i * move.inner;
      const std::vector<int> self = {i};
      if (move.inner != moves[0].inner ||
          (from_all ? !IsAll(move.sources) : move.sources != self) ||
          (to_all ? !IsAll(move.targets) : move.targets != self) ||
          move.from.offset != (from_steps ? step : 0) ||
          move.to.offset != (to_steps ? step : 0)) {
        return false;
      }
    }
    return true;
  }

  bool IsAllToAll(const std::vector<Move>& moves) const {
    if (static_cast<int>(moves.size()) != size_ * size_) return false;
    return std::all_of(moves.begin(), moves.end(), [&](const Move& move) {
      return move.sources.size() == 1 && move.targets.size() == 1 &&
             move.inner == moves[0].inner &&
             move.from.offset == move.targets[0] * move.inner &&
             move.to.offset == move.sources[0] * move.inner;
    });
  }

  // Whether the moves lead from one root to each rank, or else from each rank to one,
  // and the row of rank i lies at i * from_step in the operand and at i * to_step in
  // the result.
  bool IsRooted(const std::vector<Move>& moves, bool from_root, bool from_steps,
                bool to_steps) const {
    if (static_cast<int>(moves.size()) != size_) return false;
    for (int i = 0; i < size_; ++i) {
      const Move& move = moves[i];
      const std::vector<int>& root = from_root ? move.sources : move.targets;
      const std::vector<int>& each = from_root ? move.targets : move.sources;
      const int64_t step = i * move.inner;
      if (root.size() != 1 ||
          root != (from_root ? moves[0].sources : moves[0].targets) ||
          each != std::vector<int>{i} || move.inner != moves[0].inner ||
          move.from.offset != (from_steps ? step : 0) ||
          move.to.offset != (to_steps ? step : 0)) {
        return false;
      }
    }
    return true;
  }

  // Finds the one NCCL function that is all of a leaf's moves.
  bool AddNative(const std::vector<Move>& moves) {
    if (moves.empty() || moves[0].inner == 0) return false;
    if (size_ == 1) return false;
    if (moves.size() == 1 && IsAll(moves[0].sources) && IsAll(moves[0].targets)) {
      return AddReduction(Kind::kAllReduce, moves[0], 0);
    }
    if (IsOneForEachRank(moves, /*from_all=*/true, /*to_all=*/false,
                         /*from_steps=*/true, /*to_steps=*/false)) {
      return AddReduction(Kind::kReduceScatter, moves[0], 0);
    }
    if (natives_ == Natives::kNone) return false;
    const bool has_newer = natives_ == Natives::kOf228;
    Kind kind;
    int root = 0;
    if (IsOneForEachRank(moves, /*from_all=*/false, /*to_all=*/true,
                         /*from_steps=*/false, /*to_steps=*/true)) {
      kind = Kind::kAllGather;
    } else if (has_newer && IsAllToAll(moves)) {
      kind = Kind::kAllToAll;
    } else if (IsRooted(moves, /*from_root=*/true, /*from_steps=*/false,
                        /*to_steps=*/false)) {
      kind = Kind::kBroadcast;
      root = moves[0].sources[0];
    } else if (has_newer && IsRooted(moves, /*from_root=*/true, /*from_steps=*/true,
                                     /*to_steps=*/false)) {
      kind = Kind::kScatter;
      root = moves[0].sources[0];
    } else if (has_newer && IsRooted(moves, /*from_root=*/false, /*from_steps=*/false,
                                     /*to_steps=*/true)) {
      kind = Kind::kGather;
      root = moves[0].targets[0];
    } else {
      return false;
    }
    Step step = StepOf(kind, 0, 0, moves[0].inner);
    step.peer = root;
    steps_.grouped.push_back(step);
    return true;
  }

  Step StepOf(Kind kind, int64_t from, int64_t to, int64_t elements) const {
    Step step;
    step.kind = kind;
    step.leaf = leaf_;
    step.from = from * element_bytes_;
    step.to = to * element_bytes_;
    step.count = static_cast<size_t>(elements * element_bytes_);
    return step;
  }

  bool AddReduction(Kind kind, const Move& move, int64_t row, int root = 0) {
    const ReduceOp op = site_.attributes().reduce;
    const DataType dtype = site_.results()[leaf_].dtype;
    const std::optional<Number> number = NumberOf(dtype, op);
    if (!number.has_value()) {
      status_ = InvalidArgument(site_.description(), ": NCCL has no ", ReduceOpName(op),
                                " of ", DataTypeName(dtype));
      return true;
    }
    Step step = StepOf(kind, move.RowAt(move.from, row), move.RowAt(move.to, row), 0);
    step.count = static_cast<size_t>(move.inner * number->parts);
    step.type = number->type;
    step.op = RedOpOf(op);
    step.peer = root;
    steps_.grouped.push_back(step);
    return true;
  }

  void AddMove(const Move& move) {
    if (move.inner == 0) return;
    for (int64_t row = 0; row < move.outer * move.middle; ++row) AddRow(move, row);
  }

  void AddRow(const Move& move, int64_t row) {
    const int64_t from = move.RowAt(move.from, row), to = move.RowAt(move.to, row);
    if (move.running || move.identity) {
      status_ = InvalidArgument(site_.description(), ": NCCL has no scan");
    } else if (move.sources.size() > 1 && !IsAll(move.sources)) {
      status_ = InvalidArgument(site_.description(),
                                ": NCCL reduces over all ranks of a communicator");
    } else if (move.sources.size() > 1 && IsAll(move.targets)) {
      AddReduction(Kind::kAllReduce, move, row);
    } else if (move.sources.size() > 1) {
      for (int root : move.targets) AddReduction(Kind::kReduce, move, row, root);
    } else {
      for (int target : move.targets) AddCopy(move, from, to, target);
    }
  }

  void AddCopy(const Move& move, int64_t from, int64_t to, int target) {
    const bool receives = target == rank_;
    if (move.sources.empty()) {
      if (receives) steps_.local.push_back(StepOf(Kind::kZero, 0, to, move.inner));
      return;
    }
    const int source = move.sources[0];
    if (receives && source == rank_) {
      steps_.local.push_back(StepOf(Kind::kCopy, from, to, move.inner));
    } else if (receives || source == rank_) {
      Step step = StepOf(receives ? Kind::kRecv : Kind::kSend, from, to, move.inner);
      step.peer = receives ? source : target;
      steps_.grouped.push_back(step);
    }
  }

  const CallSite& site_;
  const int size_, rank_;
  const Natives natives_;
  Steps& steps_;
  int leaf_ = 0;
  int64_t element_bytes_ = 0;
  Status status_ = OkStatus();
};

}  // namespace

Status MakeSteps(const CallSite& site, const Plan& plan, int size, int rank,
                 Natives natives, Steps* steps) {
  Maker maker(site, size, rank, natives, steps);
  std::vector<std::vector<Move>> by_leaf(site.results().size());
  for (const Move& move : plan.moves) by_leaf[move.leaf].push_back(Joined(move));
  for (size_t leaf = 0; leaf < by_leaf.size(); ++leaf) {
    if (Status status = maker.AddLeaf(static_cast<int>(leaf), by_leaf[leaf]);
        status.failure()) {
      return status;
    }
  }
  return OkStatus();
}

}  // namespace jaxcomm
