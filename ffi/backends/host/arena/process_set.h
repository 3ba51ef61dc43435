// Processes of one host that communicate through an arena: this process's end of it.
// One thread continues the transfers whose handlers have returned, and another learns
// at once that a peer has ended.
//
// The folder arena/ owns the shared memory of the processes of a host, and what crosses
// it: crossings, channels, chunks. local/ calls it, once all ranks of this process have
// come. A transfer is a state machine that never blocks. The thread of a ProcessSet
// sleeps at its doorbell. The arena's lock is held for microseconds, and is repaired if
// a process is killed in it.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_ARENA_PROCESS_SET_H_
#define JAXCOMM_FFI_BACKENDS_HOST_ARENA_PROCESS_SET_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/host/arena/arena.h"
#include "ffi/backends/host/arena/deadlock.h"
#include "ffi/backends/host/arena/transfer.h"
#include "ffi/base/status.h"
#include "ffi/os/peer_watch.h"

namespace jaxcomm {

// A wait that has not ended so soon after the user's interrupt hangs.
inline constexpr std::chrono::seconds kAfterInterrupt(1);

// Why a transfer cannot end.
enum class Hindrance {
  kLate,      // processes have not come
  kEnded,     // processes have ended
  kDeadlock,  // processes wait in something else, for this one
};

// A transfer for ProcessSet::Continue().
struct PendingTransfer {
  Transfer* transfer = nullptr;
  std::chrono::steady_clock::time_point begin;
  double timeout_seconds = 300;
  // The message about the processes of a mask.
  std::function<std::string(uint64_t processes, Hindrance hindrance)> describe;
  std::function<void()> done;  // called when it ends
  uint64_t owner = 0;          // for Abort(): a number, since addresses are used again
  bool warns = true;           // once, when it has waited for long
  bool is_interrupted = false;
};

class ProcessSet : public std::enable_shared_from_this<ProcessSet> {
 public:
  // `peers` are in the order of the arena's processes, this one included. A peer with
  // pid 0 is not watched.
  ProcessSet(std::shared_ptr<Segment> segment, std::vector<Peer> peers, int self,
             Grace grace = Grace::OfThisProcess());
  ~ProcessSet();

  Arena& arena() const;
  const std::vector<Peer>& peers() const;

  // Steps the transfer for a moment, on this thread. True if it is done; otherwise the
  // caller hands it to Continue().
  bool RunBriefly(Transfer* transfer) const;
  // Continues the transfer on a thread of ours, which then calls `done`. If the system
  // refuses the thread, the transfer fails and `done` is called at once.
  void Continue(PendingTransfer pending);
  // Fails the transfers that do not end within kAfterInterrupt.
  void Interrupt();
  // Fails the transfers of an owner, soon.
  void Abort(uint64_t owner, const Status& reason);

  // The processes that have ended or left, as a mask.
  uint64_t gone() const;
  // The seconds for which this process has slept since another one had not come to what
  // it waits in, by JAX's index of that process.
  std::vector<std::pair<int, double>> waited() const;

 private:
  struct State;

  // Starts the thread if it does not run yet. Requires the state's mutex.
  static Status StartProgress(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_ARENA_PROCESS_SET_H_
