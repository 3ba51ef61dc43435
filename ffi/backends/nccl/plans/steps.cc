#include "ffi/backends/nccl/plans/steps.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "ffi/backends/nccl/plans/engine_choice.h"

namespace jaxcomm {
namespace {

using Kind = Step::Kind;

struct Number {
  nccl::Type type;
  int parts = 1;  // a complex number is two
};

constexpr std::pair<DataType, nccl::Type> kTypes[] = {
    {DataType::S8, nccl::Type::kInt8},     {DataType::U8, nccl::Type::kUint8},
    {DataType::S32, nccl::Type::kInt32},   {DataType::U32, nccl::Type::kUint32},
    {DataType::S64, nccl::Type::kInt64},   {DataType::U64, nccl::Type::kUint64},
    {DataType::F16, nccl::Type::kFloat16}, {DataType::BF16, nccl::Type::kBfloat16},
    {DataType::F32, nccl::Type::kFloat32}, {DataType::F64, nccl::Type::kFloat64},
};

// By ReduceOp.
constexpr nccl::RedOp kRedOps[] = {nccl::RedOp::kSum, nccl::RedOp::kProd,
                                   nccl::RedOp::kMax, nccl::RedOp::kMin,
                                   nccl::RedOp::kAvg};

// The type NCCL reduces as which; none if it cannot.
std::optional<Number> NumberOf(DataType dtype, ReduceOp op) {
  for (const auto& [known, type] : kTypes) {
    if (known == dtype) return Number{type};
  }
  const bool picks = op == ReduceOp::kMax || op == ReduceOp::kMin;
  if (dtype == DataType::PRED && picks) return Number{nccl::Type::kUint8};
  if (op != ReduceOp::kSum) return std::nullopt;
  if (dtype == DataType::C64) return Number{nccl::Type::kFloat32, 2};
  if (dtype == DataType::C128) return Number{nccl::Type::kFloat64, 2};
  return std::nullopt;
}

// The largest that CUDA takes.
constexpr int64_t kMostPitch = (int64_t{1} << 31) - 1;

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
  // Smaller rows than `least_row` bytes are steps of their own.
  Maker(const CallSite& site, const Plan& plan, int rank, Natives natives,
        int64_t least_row)
      : site_(site),
        plan_(plan),
        rank_(rank),
        natives_(natives),
        least_row_(least_row) {}

  ErrorOr<Steps> Make() {
    for (leaf_ = 0; leaf_ < static_cast<int>(plan_.leaves.size()); ++leaf_) {
      element_bytes_ = static_cast<int64_t>(site_.results()[leaf_].element_bytes);
      if (!AddNative(plan_.leaves[leaf_])) {
        plan_.ForEachMove(leaf_, rank_, [this](const Move& move) { AddMove(move); });
      }
      RETURN_IF_ERROR(status_);
    }
    return std::move(steps_);
  }

 private:
  bool IsAll(const Ranks& ranks) const {
    return static_cast<int>(ranks.size()) == plan_.size;
  }

  // Adds the one NCCL function that does what the plan does with a leaf, if there is
  // one: they take contiguous parts.
  bool AddNative(const Plan::Division& division) {
    if (plan_.size == 1 || division.inner == 0 || !plan_.IsContiguous(leaf_)) {
      return false;
    }
    const int64_t part = division.inner;
    switch (plan_.kind) {
      case Plan::Kind::kAllReduce:
        AddReduction(Kind::kAllReduce, part, 0, 0);
        return true;
      case Plan::Kind::kReduceScatter:
        AddReduction(Kind::kReduceScatter, part, 0, 0);
        return true;
      case Plan::Kind::kReduce:
        AddReduction(Kind::kReduce, part, 0, 0, plan_.root);
        if (rank_ != plan_.root) AddZeros(part);
        return true;
      case Plan::Kind::kAllGather:
        return AddWhole(Natives::kOf218, Kind::kAllGather, part);
      case Plan::Kind::kBroadcast:
        return AddWhole(Natives::kOf218, Kind::kBroadcast, part, plan_.root);
      case Plan::Kind::kAllToAll:
        return AddWhole(Natives::kOf228, Kind::kAllToAll, part);
      case Plan::Kind::kScatter:
        return AddWhole(Natives::kOf228, Kind::kScatter, part, plan_.root);
      case Plan::Kind::kGather:
        if (!AddWhole(Natives::kOf228, Kind::kGather, part, plan_.root)) return false;
        if (rank_ != plan_.root) AddZeros(plan_.size * part);
        return true;
      default:
        return false;
    }
  }

  // Adds a function for a whole collective, if it may be used.
  bool AddWhole(Natives since, Kind kind, int64_t elements, int root = 0) {
    if (natives_ < since) return false;
    AddGrouped(kind, 0, 0, elements, root);
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

  // Of all rows of a move, which are of one dimension.
  Step StepOf(const Move& move) const {
    Step step = StepOf(Kind::kCopy, move.from.offset, move.to.offset, move.inner);
    step.rows = move.middle;
    step.from_pitch = move.from.middle * element_bytes_;
    step.to_pitch = move.to.middle * element_bytes_;
    return step;
  }

  void AddGrouped(Kind kind, int64_t from, int64_t to, int64_t elements, int peer) {
    Step step = StepOf(kind, from, to, elements);
    step.peer = peer;
    steps_.grouped.push_back(step);
  }

  void AddZeros(int64_t elements) {
    steps_.local.push_back(StepOf(Kind::kZero, 0, 0, elements));
  }

  // In elements.
  void AddReduction(Kind kind, int64_t count, int64_t from, int64_t to, int root = 0) {
    const ReduceOp op = site_.attributes().reduce;
    const DataType dtype = site_.results()[leaf_].dtype;
    const std::optional<Number> number = NumberOf(dtype, op);
    if (!number.has_value()) {
      status_ = InvalidArgument(site_.description(), ": NCCL has no ", ReduceOpName(op),
                                " of ", DataTypeName(dtype));
      return;
    }
    Step step = StepOf(kind, from, to, 0);
    step.count = static_cast<size_t>(count * number->parts);
    step.type = number->type;
    step.op = kRedOps[static_cast<int>(op)];
    step.peer = root;
    steps_.grouped.push_back(step);
  }

  void AddMove(const Move& strided) {
    Move move = Joined(strided);
    if (move.inner == 0 || move.rows() == 0) return;
    if (move.needs_kernels() || move.sources.empty()) {
      for (int64_t row = 0; row < move.rows(); ++row) AddRow(move, row);
      return;
    }
    if (move.middle == 1) {
      std::swap(move.outer, move.middle);
      move.from.middle = move.from.outer;
      move.to.middle = move.to.outer;
    }
    const int64_t outer = std::exchange(move.outer, 1);
    for (int64_t i = 0; i < outer; ++i) {
      AddCopies(Joined(move));
      move.from.offset += move.from.outer;
      move.to.offset += move.to.outer;
    }
  }

  void AddRow(const Move& move, int64_t row) {
    const int64_t from = move.RowAt(move.from, row), to = move.RowAt(move.to, row);
    if (move.running || move.identity) {
      status_ = InvalidArgument(site_.description(), ": NCCL has no scan");
    } else if (move.sources.size() > 1 && !IsAll(move.sources)) {
      status_ = InvalidArgument(site_.description(),
                                ": NCCL reduces over all ranks of a communicator");
    } else if (move.sources.size() > 1 && IsAll(move.targets)) {
      AddReduction(Kind::kAllReduce, move.inner, from, to);
    } else if (move.sources.size() > 1) {
      for (int root : move.targets) {
        AddReduction(Kind::kReduce, move.inner, from, to, root);
      }
    } else if (move.targets.Contains(rank_)) {
      steps_.local.push_back(StepOf(Kind::kZero, 0, to, move.inner));
    }
  }

  // Copies from one rank to others.
  void AddCopies(const Move& move) {
    Step step = StepOf(move);
    const int source = move.sources[0];
    const bool is_apart = std::max(step.from_pitch, step.to_pitch) > kMostPitch ||
                          static_cast<int64_t>(step.count) < least_row_;
    if (step.rows > 1 && is_apart) {
      Move row = move;
      row.middle = 1;
      for (int64_t i = 0; i < move.middle; ++i) {
        AddCopies(row);
        row.from.offset += move.from.middle;
        row.to.offset += move.to.middle;
      }
    } else if (source == rank_) {
      for (int target : move.targets) {
        step.kind = target == rank_ ? Kind::kCopy : Kind::kSend;
        step.peer = target;
        (target == rank_ ? steps_.local : steps_.grouped).push_back(step);
      }
    } else if (move.targets.Contains(rank_)) {
      step.kind = Kind::kRecv;
      step.peer = source;
      steps_.grouped.push_back(step);
    }
  }

  const CallSite& site_;
  const Plan& plan_;
  const int rank_;
  const Natives natives_;
  const int64_t least_row_;
  Steps steps_;
  int leaf_ = 0;
  int64_t element_bytes_ = 0;
  Status status_ = OkStatus();
};

}  // namespace

ErrorOr<Steps> MakeStridedSteps(const CallSite& site, const Plan& plan, int rank) {
  return Maker(site, plan, rank, Natives::kNone, kLeastBytesOfRow).Make();
}

ErrorOr<Steps> MakeSteps(const CallSite& site, const Plan& plan, int rank,
                         Natives natives) {
  ASSIGN_OR_RETURN(Steps made, Maker(site, plan, rank, natives, 0).Make());
  return ForNccl(std::move(made), plan.leaves);
}

Steps ForNccl(Steps strided, const std::vector<Plan::Division>& leaves) {
  Steps made;
  made.local = std::move(strided.local);
  made.behind = std::move(strided.behind);
  std::vector<int64_t> used(leaves.size(), 0);  // of the rooms
  for (const Step& step : strided.grouped) {
    const bool is_send = step.kind == Kind::kSend;
    const auto row_bytes = static_cast<int64_t>(step.count);
    const bool from_is_dense = step.rows == 1 || step.from_pitch == row_bytes;
    const bool to_is_dense = step.rows == 1 || step.to_pitch == row_bytes;
    const int room = leaves[step.leaf].room;
    Step sent = step;
    sent.rows = 1;
    if (!(from_is_dense || to_is_dense) || (step.rows > 1 && room < 0)) {
      for (int64_t row = 0; row < step.rows; ++row) {
        made.grouped.push_back(sent);
        sent.from += step.from_pitch;
        sent.to += step.to_pitch;
      }
      continue;
    }
    sent.count = static_cast<size_t>(step.count * step.rows);
    if (!from_is_dense) sent.from_room = room;
    if (!to_is_dense) sent.to_room = room;
    if (!(is_send ? from_is_dense : to_is_dense)) {
      // All moves of a leaf have the same strides. So either what is sent is packed, or
      // what arrives, and the room holds it.
      Step packed = step;
      packed.kind = Kind::kCopy;
      int64_t& at = used[step.leaf];
      if (is_send) {
        packed.to_room = room;
        packed.to = sent.from = at;
        packed.to_pitch = row_bytes;
      } else {
        packed.from_room = room;
        packed.from = sent.to = at;
        packed.from_pitch = row_bytes;
      }
      at += step.bytes();
      (is_send ? made.local : made.behind).push_back(packed);
    }
    made.grouped.push_back(sent);
  }
  return made;
}

}  // namespace jaxcomm
