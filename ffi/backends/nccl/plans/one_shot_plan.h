// A rank's part of a collective as work for the kernels of kernels/kernels.h.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PLANS_ONE_SHOT_PLAN_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PLANS_ONE_SHOT_PLAN_H_

#include <cstdint>
#include <vector>

#include "ffi/backends/nccl/kernels/kernels.h"
#include "ffi/backends/nccl/plans/steps.h"
#include "ffi/core/call_site.h"
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

// An array of the one launch that stages a gather or an exchange, without its
// addresses.
struct ExchangedArray : ExchangeArguments::Array {
  int leaf = 0;
};

struct OneShotPlan {
  // Launches, one for each leaf.
  std::vector<OneShotWork> works;
  // Or the arrays of one launch.
  std::vector<ExchangedArray> exchanged;
  uint32_t chunks = 0;

  int arrays() const { return static_cast<int>(works.size() + exchanged.size()); }
  bool is_staged() const;
  // The bytes that a rank sends of `exchanged`, and whether rows of it are apart.
  int64_t exchanged_bytes(int size) const;
  bool has_gaps() const;
};

// Makes the part of a rank in a call from its plan and its steps. All ranks have as
// much, of the same sizes. There is none if the kernels cannot do it all: a step is no
// sum, gather, exchange or hop, not of whole words, of a type that they do not add, or
// too large. A hop has all ranks send and receive, so that each waits for every other.
OneShotPlan MakeOneShotPlan(const CallSite& site, const Plan& plan, const Steps& steps);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PLANS_ONE_SHOT_PLAN_H_
