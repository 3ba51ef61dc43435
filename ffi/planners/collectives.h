// The collectives, each of which is the target "jaxcomm.<name>" of custom calls. A new
// collective is one file that defines its planner, one line here, and its Plan::Kind.
#ifndef JAXCOMM_FFI_PLANNERS_COLLECTIVES_H_
#define JAXCOMM_FFI_PLANNERS_COLLECTIVES_H_

#include <string_view>

#include "ffi/core/plan.h"
#include "ffi/planners/problem.h"

namespace jaxcomm {

extern const Collective kAllGather, kAllReduce, kAllToAll, kBarrier, kBroadcast,
    kCheckPositions, kCheckStep, kGather, kPermute, kRaggedAllToAll, kReduce,
    kReduceScatter, kScan, kScatter;

inline constexpr const Collective* kCollectives[] = {
    &kAllGather,      &kAllReduce,     &kAllToAll, &kBarrier, &kBroadcast,
    &kCheckPositions, &kCheckStep,     &kGather,   &kPermute, &kRaggedAllToAll,
    &kReduce,         &kReduceScatter, &kScan,     &kScatter,
};
static_assert(sizeof(kCollectives) / sizeof(kCollectives[0]) == Plan::kKinds);

// Returns null if there is no collective of that name.
inline const Collective* FindCollective(std::string_view name) {
  for (const Collective* collective : kCollectives) {
    if (collective->name() == name) return collective;
  }
  return nullptr;
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_PLANNERS_COLLECTIVES_H_
