// JAXCOMM_CHECK: ranks compare what they are about to do, since NCCL does not.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_CALL_CHECK_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_CALL_CHECK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/queue/local_rank.h"
#include "ffi/base/status.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

class CallCheck {
 public:
  // It needs communicators only once it compares.
  static ErrorOr<std::unique_ptr<CallCheck>> Create(NcclParts& parts);
  ~CallCheck();

  // Waits until all ranks of the group have come to a call. Fails on all of them, and
  // ends the communicator, if it is not the same call.
  Status Compare(const Call& call, LocalRank& rank);

 private:
  // A rank's description of its call, which all ranks of the group receive.
  struct Announcement;

  struct RankState {
    // This rank's, then those of all ranks; null in a group of one.
    Announcement* announced = nullptr;
    cuda::Pointer on_device = 0;
    uint64_t compared = 0;
  };

  explicit CallCheck(NcclParts& parts) : parts_(parts), states_(parts.ranks.size()) {}

  Status Exchange(const Call& call, LocalRank& rank);
  Status Wait(const LocalRank& rank) const;
  Status FindOddRanks(const RankFacts& facts) const;

  NcclParts& parts_;
  std::vector<RankState> states_;  // by place
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_CALL_CHECK_H_
