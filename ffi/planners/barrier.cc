#include "ffi/planners/collectives.h"

namespace jaxcomm {

// Nothing moves: the results are the operands' own buffers, handed back once
// every rank has arrived.
Status PlanBarrier(const Problem&, const void* const* const*, Plan* plan) {
  plan->kind = Plan::Kind::kNothing;
  return OkStatus();
}

}  // namespace jaxcomm
