// All moves of a plan, cut into blocks: what the host backend carries out.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_REDUCE_HOST_PLAN_H_
#define JAXCOMM_FFI_BACKENDS_HOST_REDUCE_HOST_PLAN_H_

#include <cstdint>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/core/call_site.h"
#include "ffi/core/plan.h"

namespace jaxcomm {

// A piece of a move small enough to share out between threads and large enough
// to stream: rows [row_begin, row_end) of outer x middle, elements [inner_begin,
// inner_end) of each.
struct Block {
  int move = 0;
  int64_t row_begin = 0, row_end = 0;
  int64_t inner_begin = 0, inner_end = 0;

  int64_t rows() const { return row_end - row_begin; }
  int64_t width() const { return inner_end - inner_begin; }
};

// Adds the blocks of `move`, number `index`, to `blocks`: of about `bytes` each, in
// elements of `width` bytes. A row of `whole_bytes` or less is not cut.
void CutMove(const Move& move, int index, int64_t width, int64_t bytes,
             int64_t whole_bytes, std::vector<Block>* blocks);

struct HostPlan {
  int size = 0;           // ranks of the group
  bool pairwise = false;  // see Plan
  std::vector<Move> moves;
  std::vector<int> all_moves;              // their indices
  std::vector<Block> blocks;               // grouped by move
  std::vector<int> first_block;            // of each move, plus one past the end
  std::vector<std::vector<int>> moves_of;  // by rank; only where `pairwise`
  int64_t touched = 0;                     // bytes read and written, over all ranks
};

// Makes it for a group of `size` ranks. Fails if it reduces a type that cannot be
// reduced. `operands_of`: see Planner.
ErrorOr<HostPlan> MakeHostPlan(const CallSite& site, int size,
                               const void* const* const* operands_of);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_REDUCE_HOST_PLAN_H_
