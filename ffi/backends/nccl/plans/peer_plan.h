// A collective as copies between the memories of the devices of one process.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PLANS_PEER_PLAN_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PLANS_PEER_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/backends/nccl/plans/steps.h"
#include "ffi/core/call_site.h"
#include "ffi/core/plan.h"

namespace jaxcomm {

struct PeerPlan {
  struct Part {
    std::vector<Step> local;            // copies within the rank, and zeros
    std::vector<Step> copies;           // sends; the peer is the target
    std::vector<int> targets, sources;  // without the rank, each once
  };

  // The bytes of the rank that sends most, and the most copies of a rank.
  int64_t bytes_sent = 0, copies = 0;
  bool moves_along_pairs = false;  // a permutation
  std::vector<Part> parts;         // by rank; empty where NCCL is to do it
  std::vector<Plan::Division> leaves;
};

// Whether copies between GPUs can serve a collective of this kind: it reduces nothing,
// and not all bytes leave from one GPU, once for each of the others. NCCL passes those
// of a broadcast on: it took 0.91 of the time of copies on two H200s.
bool CopiesServe(Plan::Kind kind);

// Adds a rank to a list that has each once.
void AddOnce(std::vector<int>& ranks, int rank);

// Makes the plan, the same on every rank. It has no parts if a step is no move, or if
// no call of its kind is worth copying: see Choose().
PeerPlan MakePeerPlan(const CallSite& site, const Plan& plan);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PLANS_PEER_PLAN_H_
