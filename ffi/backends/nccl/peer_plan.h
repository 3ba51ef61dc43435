// A collective as copies between the memories of the devices of one process.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PEER_PLAN_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PEER_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/backends/nccl/steps.h"
#include "ffi/core/call_site.h"
#include "ffi/core/plan.h"

namespace jaxcomm {

struct PeerPlan {
  struct Copy {
    int target = 0;
    int leaf = 0;
    int64_t from = 0;  // bytes into the operand
    int64_t to = 0;    // bytes into the target's result
    size_t bytes = 0;
  };

  struct Part {
    std::vector<Step> local;  // copies within the rank, and zeros
    std::vector<Copy> copies;
    std::vector<int> targets, sources;  // without the rank, each once
  };

  std::vector<Part> parts;  // by rank; empty where NCCL is to do it
};

// Whether there may be a plan, which most calls are too small for.
bool MayBeCopied(const CallSite& site, int size);

// The same on every rank. Empty where something is reduced, or there is too little to
// move for what a copy costs to start.
PeerPlan MakePeerPlan(const CallSite& site, const Plan& plan);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PEER_PLAN_H_
