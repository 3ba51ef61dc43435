// What a collective does, for every backend. A Plan says which collective it is, with
// its parameters. It expands on demand into strided moves between the ranks of a group.
// A backend that can carry out moves can carry out every collective. A backend with a
// faster way for some of them, such as ncclAllReduce, looks at the kind.
//
// A plan holds a few numbers per leaf, but may expand into size * size moves per leaf:
// backends expand only the moves that they need.
#ifndef JAXCOMM_FFI_CORE_PLAN_H_
#define JAXCOMM_FFI_CORE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/core/dtype.h"

namespace jaxcomm {

// One operand or result of a call on one rank.
struct Leaf {
  DataType dtype;
  std::vector<int64_t> dims;
  int64_t elements;
  size_t element_bytes;

  int64_t bytes() const { return elements * static_cast<int64_t>(element_bytes); }
};

// Where the rows of a move lie in a buffer, in elements: row (i, j) starts at
// offset + i * outer + j * middle.
struct Strides {
  int64_t offset = 0;
  int64_t outer = 0;
  int64_t middle = 0;
};

// Ranks of a group in some order. Allocates nothing.
class Ranks {
 public:
  class Iterator {  // as much as range-based for takes
   public:
    Iterator(const Ranks* ranks, size_t index) : ranks_(ranks), index_(index) {}
    int operator*() const { return (*ranks_)[index_]; }
    Iterator& operator++() {
      ++index_;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return index_ != other.index_; }

   private:
    const Ranks* ranks_;
    size_t index_;
  };

  Ranks() = default;  // none
  static Ranks One(int rank) { return {rank, 1, 1}; }
  static Ranks All(int size) { return {0, size, 1}; }
  // `count` ranks: first, first + step, ... The step is 1 or -1.
  static Ranks Range(int first, int count, int step = 1) {
    return {first, count, step};
  }
  // `list` must live longer.
  static Ranks Of(const std::vector<int>& list) {
    Ranks ranks{0, static_cast<int>(list.size()), 1};
    ranks.list_ = list.data();
    return ranks;
  }

  size_t size() const { return static_cast<size_t>(count_); }
  bool empty() const { return count_ == 0; }
  int operator[](size_t index) const {
    return list_ != nullptr ? list_[index] : first_ + static_cast<int>(index) * step_;
  }
  Iterator begin() const { return {this, 0}; }
  Iterator end() const { return {this, size()}; }
  bool Contains(int rank) const;

 private:
  Ranks(int first, int count, int step) : first_(first), count_(count), step_(step) {}

  int first_ = 0;
  int count_ = 0;
  int step_ = 1;
  const int* list_ = nullptr;
};

// Moves outer x middle rows of `inner` contiguous elements from operand `leaf`
// of the sources to result `leaf` of the targets.
//   one source       every target receives a copy;
//   several sources  every target receives their reduction, by a tree over their order;
//   no source        every target is filled with zeros, or with the identity of
//                    the reduction if `identity` is set;
//   running          target i receives the reduction of sources 0 .. i.
struct Move {
  int leaf = 0;
  Ranks sources;
  Ranks targets;
  bool running = false;
  bool identity = false;
  int64_t outer = 1;
  int64_t middle = 1;
  int64_t inner = 0;
  Strides from;
  Strides to;

  int64_t rows() const { return outer * middle; }
  // Its targets, then the sources that are none.
  std::vector<int> Involved() const;
  // Whether it takes arithmetic, and not copies alone.
  bool needs_kernels() const { return running || identity || sources.size() > 1; }
  // Where a row of outer x middle begins, in elements.
  int64_t RowAt(const Strides& strides, int64_t row) const {
    return strides.offset + row / middle * strides.outer +
           row % middle * strides.middle;
  }
};

using MoveVisitor = std::function<void(const Move&)>;

struct Plan {
  // Which collective. ffi/planners says what each does.
  enum class Kind {
    kAllGather,
    kAllReduce,
    kAllToAll,
    kBarrier,
    kBroadcast,
    kCheckPositions,
    kCheckStep,
    kGather,
    kPermute,
    kRaggedAllToAll,
    kReduce,
    kReduceScatter,
    kScan,
    kScatter,
  };
  static constexpr int kKinds = static_cast<int>(Kind::kScatter) + 1;
  // Instead of a rank: the moves of all ranks.
  static constexpr int kEveryRank = -1;

  // How one leaf is divided: a rank has outer x middle rows of `inner` elements.
  struct Division {
    int64_t outer = 1;
    int64_t middle = 1;
    int64_t inner = 0;
    bool split_first = false;  // of kAllToAll
    // Likewise: the result that has room for what cannot be sent as it lies; -1: none.
    int room = -1;
  };
  // A slice of kRaggedAllToAll, in elements.
  struct Slice {
    int source, target;
    int64_t from, to, elements;
  };

  // Visits the moves of one leaf in which `rank` takes part, and perhaps others. Their
  // order does not depend on `rank`.
  using Expansion = void (*)(const Plan& plan, int leaf, int rank,
                             const MoveVisitor& visit);

  Kind kind = Kind::kBarrier;
  Expansion expansion = nullptr;  // see Collective
  bool pairwise = false;          // likewise
  int size = 0;                   // ranks of the group
  std::vector<Division> leaves;
  int root = 0;                // of kBroadcast, kGather, kReduce and kScatter
  bool exclusive = false;      // kScan
  bool reverse = false;        // kScan
  std::vector<int> source_of;  // kPermute: by target, -1 for none
  std::vector<Slice> slices;   // kRaggedAllToAll

  // Whether a rank's part of the leaf is contiguous.
  bool IsContiguous(int leaf) const {
    return leaves[leaf].outer * leaves[leaf].middle == 1;
  }

  // Calls `visit` for each move of a leaf in which `rank` takes part, or for all with
  // kEveryRank. The order of the moves is the same for all ranks.
  void ForEachMove(int leaf, int rank, const MoveVisitor& visit) const;
};

// The name of a collective, "all_gather".
std::string_view KindName(Plan::Kind kind);

// What a planner plans.
struct Problem {
  int size;                           // ranks of the group
  const std::vector<Leaf>& operands;  // the same on every rank
  const std::vector<Leaf>& results;
  const std::vector<int64_t>& params;  // meaning: see the collective's file
};

// Fills the plan of a collective. Refuses parameters and shapes that do not fit
// together: a program may come from elsewhere. `operands_of`, indexed by
// [rank][operand], is null unless the moves depend on the values of the operands.
using Planner = Status (*)(const Problem& problem,
                           const void* const* const* operands_of, Plan* plan);

// A collective, as its planner's file defines it. All of them:
// ffi/planners/collectives.h
struct Collective {
  Plan::Kind kind;
  Planner planner;
  Plan::Expansion moves;  // null: nothing moves
  // Every move has one source and one target, or none and one. Each is run as soon as
  // its own ranks are there: a rank is done when its moves are.
  bool pairwise = false;
  // The plan depends on the values of the operands from this one on, and is made anew
  // each time. -1: it does not.
  int plan_reads_operands_from = -1;

  std::string_view name() const { return KindName(kind); }
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_PLAN_H_
