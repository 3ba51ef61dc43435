// The operands that a planner reads, brought to all processes of a group.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_VALUE_EXCHANGE_H_
#define JAXCOMM_FFI_BACKENDS_HOST_VALUE_EXCHANGE_H_

#include <vector>

#include "ffi/backends/host/group_members.h"
#include "ffi/backends/host/host_plan.h"
#include "ffi/backends/host/local_round.h"
#include "ffi/backends/host/stream_plan.h"
#include "ffi/backends/host/transfer.h"

namespace jaxcomm {

// An all-gather of them to one rank of each process.
class ValueExchange {
 public:
  ValueExchange(const LocalRound& round, const GroupMembers& members, int self);

  Transfer::Work work() const;
  // The gathered operands by rank and operand, as planners want them.
  const void* const* const* operands_of() const { return operands_of_.data(); }

 private:
  const CallSite& site_;
  const GroupBuffers from_;
  HostPlan plan_;
  StreamPlan stream_;
  std::vector<std::vector<char>> gathered_;  // by operand: those of all ranks in turn
  std::vector<void*> results_;               // the same, as pointers
  std::vector<void* const*> results_of_;
  std::vector<const void*> operands_;
  std::vector<const void* const*> operands_of_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_VALUE_EXCHANGE_H_
