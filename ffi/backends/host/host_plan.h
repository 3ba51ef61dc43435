// All moves of a plan, cut into blocks: what the host backend carries out.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_HOST_PLAN_H_
#define JAXCOMM_FFI_BACKENDS_HOST_HOST_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/core/call_site.h"
#include "ffi/core/plan.h"

namespace jaxcomm {

// A piece of a move small enough to share out between threads and large enough
// to stream: rows [row_begin, row_end) of outer x middle, elements [inner_begin,
// inner_end) of each.
struct Block {
  int move;
  int64_t row_begin, row_end;
  int64_t inner_begin, inner_end;
};

struct HostPlan {
  int size = 0;           // ranks of the group
  bool pairwise = false;  // see Plan
  std::vector<Move> moves;
  std::vector<Block> blocks;               // grouped by move
  std::vector<int> first_block;            // of each move, plus one past the end
  std::vector<std::vector<int>> moves_of;  // by rank; only where `pairwise`
  int64_t touched = 0;                     // bytes read and written, over all ranks
};

// Makes it for a group of `size` ranks. Fails if it reduces a type that cannot be
// reduced. `operands_of`: see Planner.
Status MakeHostPlan(const CallSite& site, int size,
                    const void* const* const* operands_of, HostPlan* plan);

// The plan of a call site that does not read operands, made once for groups of `size`
// ranks and kept as long as the site.
Status FindHostPlan(CallSite& site, int size, const HostPlan** plan);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_HOST_PLAN_H_
