// What a collective does, said once for every backend: a list of strided moves
// between the ranks of a group. A backend that can carry out moves can carry
// out every collective; one that knows a faster way for some of them
// (ncclAllReduce, say) looks at the call site's name first.
#ifndef JAXCOMM_FFI_PLAN_H_
#define JAXCOMM_FFI_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/dtype.h"
#include "ffi/status.h"

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

// Moves outer x middle rows of `inner` contiguous elements from operand `leaf`
// of the sources to result `leaf` of the targets.
//   one source       every target receives a copy;
//   several sources  every target receives their reduction in rank order;
//   no source        every target is filled with zeros, or with the identity of
//                    the reduction if `identity` is set;
//   running          target i receives the reduction of sources 0 .. i.
struct Move {
  int leaf = 0;
  std::vector<int> sources;
  std::vector<int> targets;
  bool running = false;
  bool identity = false;
  int64_t outer = 1;
  int64_t middle = 1;
  int64_t inner = 0;
  Strides from;
  Strides to;

  // Where a row of outer x middle begins, in elements.
  int64_t RowAt(const Strides& strides, int64_t row) const {
    return strides.offset + row / middle * strides.outer +
           row % middle * strides.middle;
  }
};

// A piece of a move small enough to share out between threads and large enough
// to stream: rows [row_begin, row_end) of outer x middle, elements [inner_begin,
// inner_end) of each.
struct Block {
  int move;
  int64_t row_begin, row_end;
  int64_t inner_begin, inner_end;
};

struct Plan {
  std::vector<Move> moves;
  // Each move is run as soon as its own sources and targets are there, and a
  // rank is done when its moves are: for moves with one source and one target.
  bool pairwise = false;

  // Filled by Finish().
  std::vector<Block> blocks;               // grouped by move
  std::vector<int> first_block;            // of each move, plus one past the end
  std::vector<std::vector<int>> moves_of;  // by rank
  int64_t touched = 0;                     // bytes read and written, over all ranks

  // Cuts the moves into blocks and indexes them by rank.
  void Finish(int size, const std::vector<Leaf>& leaves);
};

// What a planner is asked.
struct Problem {
  int size;                           // ranks of the group
  const std::vector<Leaf>& operands;  // the same on every rank
  const std::vector<Leaf>& results;
  const std::vector<int64_t>& params;  // meaning: see the collective's file
};

// Appends the moves of a collective to `plan`. `operands_of`, indexed by
// [rank][operand], is given to the planners of a collective whose moves depend
// on the values of its operands and is null otherwise.
using Planner = Status (*)(const Problem& problem,
                           const void* const* const* operands_of, Plan* plan);

// Every rank of 0 .. size-1.
std::vector<int> AllRanks(int size);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_PLAN_H_
