// JAXCOMM_CHECK: ranks compare what they are about to do, since NCCL does not.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_CALL_CHECK_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_CALL_CHECK_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/exchange.h"
#include "ffi/backends/nccl/queue/local_rank.h"
#include "ffi/base/status.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

class CallCheck {
 public:
  // It needs communicators only once it compares.
  static ErrorOr<std::unique_ptr<CallCheck>> Create(NcclParts& parts);

  // Waits until all ranks of the group have come to a call. Fails on all of them, and
  // ends the communicator, if it is not the same call.
  Status Compare(const Call& call, LocalRank& rank);

 private:
  // A rank's description of its call, which all ranks of the group receive.
  struct Announcement;

  CallCheck(NcclParts& parts, std::unique_ptr<Exchange> exchange)
      : parts_(parts), exchange_(std::move(exchange)), compared_(parts.ranks.size()) {}

  Status Announce(const Call& call, LocalRank& rank);
  Status FindOddRanks(const RankFacts& facts) const;

  NcclParts& parts_;
  const std::unique_ptr<Exchange> exchange_;
  std::deque<uint64_t> compared_;  // calls, by place
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_CALL_CHECK_H_
