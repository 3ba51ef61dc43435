// Failures between processes: what the ranks of this process are told.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_PEER_FAILURE_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_PEER_FAILURE_H_

#include <cstdint>
#include <string>

#include "ffi/backends/host/arena/process_set.h"
#include "ffi/backends/host/arena/transfer.h"
#include "ffi/backends/host/local/group_members.h"
#include "ffi/backends/host/local/local_round.h"
#include "ffi/base/status.h"

namespace jaxcomm {

class PeerFailure {
 public:
  PeerFailure(const CommunicatorSpec& spec, const GroupMembers& members)
      : spec_(spec), members_(members) {}

  // That the processes of a mask hinder the round.
  std::string TextOf(const LocalRound& round, uint64_t processes,
                     Hindrance hindrance) const;
  // The failure of a transfer by another process, as this process sees it.
  Status StatusOf(const LocalRound& round, const Transfer& transfer) const;

 private:
  std::string Caller(const LocalRound& round) const;
  std::string NameOf(int process) const;
  // The call that a process is in, or was in last.
  std::string LastCallOf(int process, bool ended) const;
  std::string AdviceAfterEnd(uint64_t processes) const;
  // Those of a mask that ended their work here by themselves.
  uint64_t HaveLeft(uint64_t processes) const;

  const CommunicatorSpec& spec_;
  const GroupMembers& members_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_PEER_FAILURE_H_
