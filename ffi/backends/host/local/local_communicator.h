// The host backend. Ranks of one process share an address space and move bytes straight
// from operand to result (local_group.h). Where a group spans processes, they go
// through shared memory (round_carrier.h).
//
// The folder local/ owns communicators, their groups and rounds, and the threads on
// which ranks continue. XLA's handlers and the watchdog call it. A handler spins for at
// most 0.1 ms (local_wait.h) and never waits for another rank. Programs of XLA that
// continue on a thread of continuer.h may block there, and hold up no other.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_COMMUNICATOR_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "ffi/backends/host/local/group_members.h"
#include "ffi/backends/host/local/local_group.h"
#include "ffi/core/communicator.h"
#include "ffi/core/watchdog.h"

namespace jaxcomm {

class LocalCommunicator final : public Communicator, public Watched {
 public:
  explicit LocalCommunicator(CommunicatorSpec spec);
  ~LocalCommunicator() override;

  xla::ffi::Future Execute(const Call& call) override;
  void Abort(const Status& reason) override;
  void EndRun(int64_t run_id, const Status& reason) override;
  void Interrupt() override;
  std::vector<int64_t> FailedRuns() const override;
  CommunicatorStats stats() const override;

  // Watched: fails what has timed out.
  bool Poll() override;

 private:
  struct Member {
    LocalGroup* group;
    int rank;
  };

  // The members of a group; none if this process has no rank in it.
  GroupMembers MembersOf(size_t index) const;
  void AbortGroups(const Status& reason);
  // Prints the spec's hint once, if ranks may be missing for want of threads.
  void WarnIfRanksAreLate(LocalGroup::Clock::time_point now);

  const HostContext context_;
  std::vector<std::unique_ptr<LocalGroup>> groups_;
  std::unordered_map<int64_t, Member> members_;  // by device
  bool has_warned_ = false;                      // of the watchdog's thread
};

// Makes a local communicator and has it watched for timeouts. If the system refuses the
// threads that this takes, every call of the communicator fails and says so.
std::shared_ptr<Communicator> MakeLocalCommunicator(CommunicatorSpec spec);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_LOCAL_COMMUNICATOR_H_
