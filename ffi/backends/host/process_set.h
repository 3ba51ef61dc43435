// Processes of one host that communicate through an arena: this process's end of it,
// with one thread that carries on the transfers whose handlers have returned, and one
// that learns at once of the end of a peer.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_PROCESS_SET_H_
#define JAXCOMM_FFI_BACKENDS_HOST_PROCESS_SET_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/host/arena.h"
#include "ffi/backends/host/transfer.h"
#include "ffi/core/status.h"
#include "ffi/os/peer_watch.h"

namespace jaxcomm {

// A transfer, what it belongs to, and what is to happen when it ends.
struct PendingTransfer {
  Transfer* transfer = nullptr;
  std::chrono::steady_clock::time_point begin;
  double timeout_seconds = 300;
  // Text for "psum(...) over axes ...: " + what went wrong, for members in a mask.
  std::function<std::string(uint64_t processes, bool died)> describe;
  std::function<void()> done;
  uint64_t owner = 0;  // for Abort: a number, for an address may be had twice
  bool warns = true;   // once, when it has waited for long
};

class ProcessSet : public std::enable_shared_from_this<ProcessSet> {
 public:
  // `peers` are in the order of the arena's processes, this one included; those of
  // pid 0 are not watched.
  ProcessSet(std::shared_ptr<Segment> segment, std::vector<Peer> peers, int self);
  ~ProcessSet();

  Arena& arena() const;
  const std::vector<Peer>& peers() const;

  // Steps the transfer for a moment, on this thread. True if it is done. Else it is
  // to be handed to Continue().
  bool RunBriefly(Transfer* transfer) const;
  // Has a thread of ours carry it on; `done` is called from there. If the system
  // refuses the thread, the transfer fails and `done` is called at once.
  void Continue(PendingTransfer pending);
  // Fails the transfers of an owner, soon.
  void Abort(uint64_t owner, const Status& reason);

  // The processes that have ended or left, as a mask.
  uint64_t gone() const;

  // Transfers in progress that Continue() was given.
  int64_t pending() const;

 private:
  struct State;

  // Starts the thread if it does not run yet. Requires the state's mutex.
  Status StartProgressLocked();

  const std::shared_ptr<State> state_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_PROCESS_SET_H_
