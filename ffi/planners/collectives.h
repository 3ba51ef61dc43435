// The custom calls this library registers: "jaxcomm.<name>" for every entry.
// A new collective is one file that defines its planner, and one line here.
#ifndef JAXCOMM_FFI_PLANNERS_COLLECTIVES_H_
#define JAXCOMM_FFI_PLANNERS_COLLECTIVES_H_

#include <string_view>

#include "ffi/core/plan.h"

namespace jaxcomm {

struct Collective {
  std::string_view name;
  Planner planner;
  // The plan depends on the values of the operands from this one on, and is made anew
  // each time; -1: it does not.
  int plan_reads_operands_from = -1;
};

Status PlanAllGather(const Problem&, const void* const* const*, Plan*);
Status PlanAllReduce(const Problem&, const void* const* const*, Plan*);
Status PlanAllToAll(const Problem&, const void* const* const*, Plan*);
Status PlanBarrier(const Problem&, const void* const* const*, Plan*);
Status PlanBroadcast(const Problem&, const void* const* const*, Plan*);
Status PlanGather(const Problem&, const void* const* const*, Plan*);
Status PlanPermute(const Problem&, const void* const* const*, Plan*);
Status PlanRaggedAllToAll(const Problem&, const void* const* const*, Plan*);
Status PlanReduce(const Problem&, const void* const* const*, Plan*);
Status PlanReduceScatter(const Problem&, const void* const* const*, Plan*);
Status PlanScan(const Problem&, const void* const* const*, Plan*);
Status PlanScatter(const Problem&, const void* const* const*, Plan*);

inline constexpr Collective kCollectives[] = {
    {"all_gather", PlanAllGather},
    {"all_reduce", PlanAllReduce},
    {"all_to_all", PlanAllToAll},
    {"barrier", PlanBarrier},
    {"broadcast", PlanBroadcast},
    {"gather", PlanGather},
    {"permute", PlanPermute},
    {"ragged_all_to_all", PlanRaggedAllToAll, /*plan_reads_operands_from=*/2},
    {"reduce", PlanReduce},
    {"reduce_scatter", PlanReduceScatter},
    {"scan", PlanScan},
    {"scatter", PlanScatter},
};
inline constexpr int kNumCollectives =
    static_cast<int>(sizeof(kCollectives) / sizeof(kCollectives[0]));

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_PLANNERS_COLLECTIVES_H_
