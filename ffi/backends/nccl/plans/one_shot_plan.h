// A rank's part of a collective as work for the kernels of kernels/kernels.h.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PLANS_ONE_SHOT_PLAN_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PLANS_ONE_SHOT_PLAN_H_

#include <cstdint>
#include <vector>

#include "ffi/backends/nccl/kernels/kernels.h"
#include "ffi/backends/nccl/plans/steps.h"
#include "ffi/core/plan.h"

namespace jaxcomm {

// One launch. The numbers are those of OneShotArguments.
struct OneShotWork {
  OneShotWord word = OneShotWord::kMoved;
  bool is_staged = false;
  int leaf = 0;
  int64_t from = 0, to = 0;  // bytes into the operand and the result
  uint32_t part = 0, words = 0;
  uint32_t from_stride = 0, to_stride = 0;
  bool is_shared = false;
  uint32_t target = OneShotArguments::kAll, source = OneShotArguments::kAll;
  float factor = 1;
};

// Makes the work of a rank, one for each leaf, from its steps. All ranks have as much,
// of the same sizes. There is none if the kernels cannot do all steps: a step is no
// sum, gather, exchange or hop, not of whole words, of a type that they do not add, or
// too large. A hop has all ranks send and receive, so that each waits for every other.
std::vector<OneShotWork> MakeOneShotPlan(const Plan& plan, const Steps& steps);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PLANS_ONE_SHOT_PLAN_H_
