// Reports at once that another process of this host has ended.
#ifndef JAXCOMM_FFI_OS_PEER_WATCH_H_
#define JAXCOMM_FFI_OS_PEER_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace jaxcomm {

// A process of this host.
struct Peer {
  int64_t pid = 0;          // 0: not watched
  uint64_t start_time = 0;  // tells it from a later process of the same id
  int process_index = 0;    // JAX's
  // The process's SentinelThread(): its exit counts as the process's exit. 0: wait
  // until the process is fully torn down.
  int64_t thread = 0;
};

// Describes a live process.
Peer PeerOf(int64_t pid, int process_index);

// Whether the peer has certainly ended, or begun to. False also if nobody can say.
bool HasEnded(const Peer& peer);

// Returns the id of an idle thread of this process. It ends as soon as the process is
// killed or begins to exit. The process itself may take another 100 ms to free the
// memory of a GPU. Returns 0 if the system refuses the thread.
int64_t SentinelThread();

// One thread that waits for the end of any of the peers. If the system refuses the
// thread, nobody waits, and a line on stderr says so.
class PeerWatch {
 public:
  // For each peer that ends or has ended, the thread calls `ended` once, with the
  // peer's index.
  PeerWatch(std::vector<Peer> peers, std::function<void(size_t index)> ended);
  // `ended` may destroy the watch. It is not called afterwards.
  ~PeerWatch();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_PEER_WATCH_H_
