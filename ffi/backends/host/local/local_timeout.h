// Timeouts between the ranks of one process: what each of them is told.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_TIMEOUT_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_TIMEOUT_H_

#include <string>
#include <vector>

#include "ffi/backends/host/local/group_members.h"
#include "ffi/backends/host/local/local_round.h"
#include "ffi/base/status.h"
#include "ffi/core/rendezvous.h"

namespace jaxcomm {

// Why a round failed.
struct LocalFailure {
  Status to_all;                     // also to ranks that come later
  std::vector<std::string> to_rank;  // in place of its text, if there are any

  Status For(int rank) const {
    return to_rank.empty() ? to_all : Status(*to_all.errc(), to_rank[rank]);
  }
};

// Why ranks of this process may be unable to come, and what to do about it: that of the
// communicator, else that of the process.
std::string HintIfLate(const CommunicatorSpec& spec);
// Sets that of the process.
void SetHintIfLate(std::string hint);

// Writes the messages about one group. Requires the lock of its rounds.
class LocalTimeout {
 public:
  LocalTimeout(const CommunicatorSpec& spec, const GroupMembers& members,
               const Rendezvous<LocalRound>& rounds)
      : spec_(spec), members_(members), rounds_(rounds) {}

  LocalFailure FailureOf(const LocalRound& round) const;

  // Whether a rank waits, and a rank of this process is missing that waits nowhere
  // else.
  bool LacksRanks(const LocalRound& round) const;
  // The notice about that.
  std::string NoticeOf(const LocalRound& round, double seconds) const;

 private:
  std::string TextFor(int rank, const LocalRound& round) const;
  std::vector<int> Missing(const LocalRound& round) const;
  // The round, other than `round`, in which the rank waits. Null if there is none.
  const LocalRound* WaitsElsewhere(int rank, const LocalRound& round) const;

  const CommunicatorSpec& spec_;
  const GroupMembers& members_;
  const Rendezvous<LocalRound>& rounds_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_TIMEOUT_H_
