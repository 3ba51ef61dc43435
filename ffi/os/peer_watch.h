// Learning at once that another process of this host has ended.
#ifndef JAXCOMM_FFI_OS_PEER_WATCH_H_
#define JAXCOMM_FFI_OS_PEER_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace jaxcomm {

// A process, as others know it.
struct Peer {
  int64_t pid = 0;          // 0: nobody, who is not watched
  uint64_t start_time = 0;  // tells it from a later process of the same id
  int process_index = 0;    // JAX's
  // Of the process, by LifeThread(): the end of this thread is the end of the process
  // to the watch. 0: the system is to have taken back all that the process had.
  int64_t thread = 0;
};

// A live process as a peer.
Peer PeerOf(int64_t pid, int process_index);

// Returns the id of a thread of this process that does nothing. It ends as soon as the
// process is killed or begins to exit, where the process itself may take 100 ms to give
// back the memory of a GPU. Returns 0 if the system starts no such thread.
int64_t LifeThread();

// One thread that waits for the end of any of the peers. If the system starts no
// thread, nobody waits, and a line on stderr says so.
class PeerWatch {
 public:
  // Calls `ended` once for each peer that ends or has ended, with its place among them,
  // from the thread.
  PeerWatch(std::vector<Peer> peers, std::function<void(size_t place)> ended);
  // May be called from `ended`, which is not called afterwards.
  ~PeerWatch();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_PEER_WATCH_H_
