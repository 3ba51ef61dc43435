// Calls of NCCL that wait for other processes, which may never come.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_PATIENCE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_PATIENCE_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/os/peer_watch.h"

namespace jaxcomm {

class Health;

// How long to wait for the other processes, and what else ends the wait (Ctrl-C).
struct NcclPatience {
  double seconds = 300;
  std::function<bool()> interrupted = [] { return false; };

  // "`what` is not done after 300 s; other processes may not have come to it".
  Status LateError(std::string_view what) const;
};

// The patience to wait for other processes: it also ends soon after one of them has
// ended. For a moment it lasts, because the process may have done its part before.
NcclPatience WhilePeersLive(const NcclPatience& patience, std::vector<Peer> peers);

// The error of a wait for other processes, which names those that have ended.
Status WithEndedPeers(const Status& error, const std::vector<Peer>& peers);

// Runs call() on a thread of its own, until the patience or Ctrl-C ends the
// communicator. `owner` keeps the communicator as long as the thread runs.
Status RunPatiently(Health& health, std::shared_ptr<void> owner,
                    const std::string& what, const NcclPatience& patience,
                    std::function<Status()> call);

// Runs call() on this thread. The end of the communicator lets it go at the timeout.
// Ctrl-C is seen then only.
Status RunGuarded(Health& health, const std::string& what, const NcclPatience& patience,
                  const std::function<Status()>& call);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_PATIENCE_H_
