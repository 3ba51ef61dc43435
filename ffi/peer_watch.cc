#include "ffi/peer_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "ffi/forked.h"
#include "ffi/status.h"
#include "ffi/system_file.h"

namespace jaxcomm {
namespace {

// How often processes are looked for where the system cannot watch them.
constexpr int kPollMilliseconds = 50;

// Clock ticks after boot at which a process began; 0 if it has ended.
uint64_t StartTime(int64_t pid) {
  const std::string text = ReadSystemFile(StrCat("/proc/", pid, "/stat"));
  // The second field, in parentheses, may hold anything.
  const char* at = std::strrchr(text.c_str(), ')');
  if (at == nullptr || at[1] == 0) return 0;
  const char state = at[2];
  if (state == 'Z' || state == 'X') return 0;
  for (int field = 2; at != nullptr && field < 22; ++field) {
    at = std::strchr(at + 1, ' ');
  }
  return at == nullptr ? 0 : std::strtoull(at + 1, nullptr, 10);
}

bool IsGone(const Peer& peer) { return StartTime(peer.pid) != peer.start_time; }

// PIDFD_THREAD, of Linux 6.9; older ones refuse it.
constexpr unsigned kOfThread = O_EXCL;

// What poll(2) tells the end of a peer by; negative if the system has no such thing.
int OpenPeer(const Peer& peer) {
  if (peer.thread != 0) {
    const auto thread = static_cast<pid_t>(peer.thread);
    const int fd = static_cast<int>(syscall(SYS_pidfd_open, thread, kOfThread));
    // Another process's thread may have the id by now.
    const std::string path = StrCat("/proc/", peer.pid, "/task/", peer.thread);
    if (fd >= 0 && access(path.c_str(), F_OK) == 0) return fd;
    if (fd >= 0) close(fd);
  }
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(peer.pid), 0));
}

}  // namespace

int64_t LifeThread() {
  static auto& mutex = *new std::mutex;
  static pid_t pid = 0;
  static int64_t thread = 0;
  std::lock_guard<std::mutex> lock(mutex);
  // A forked child has none of its parent's threads.
  if (pid == getpid()) return thread;
  pid = getpid();
  auto id = std::make_shared<std::promise<int64_t>>();
  // Signals are for others.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([id] {
    id->set_value(syscall(SYS_gettid));
    while (true) pause();
  }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  thread = id->get_future().get();
  return thread;
}

Peer PeerOf(int64_t pid, int process_index) {
  return Peer{pid, StartTime(pid), process_index};
}

struct PeerWatch::State {
  std::vector<Peer> peers;
  std::function<void(size_t)> ended;
  std::atomic<bool> stopping{false};
  int stop_fd = -1;  // wakes the thread
  std::thread thread;

  ~State() { close(stop_fd); }
  void Run();
};

PeerWatch::PeerWatch(std::vector<Peer> peers, std::function<void(size_t place)> ended)
    : state_(std::make_shared<State>()) {
  state_->peers = std::move(peers);
  state_->ended = std::move(ended);
  state_->stop_fd = eventfd(0, EFD_CLOEXEC);
  // The thread shares the state: the watch may be let go from `ended`.
  state_->thread = std::thread([state = state_] { state->Run(); });
}

PeerWatch::~PeerWatch() {
  // It would wake the parent's thread, and wait for its own, which it has not.
  if (IsForked()) return;
  state_->stopping.store(true, std::memory_order_release);
  const uint64_t one = 1;
  (void)!write(state_->stop_fd, &one, sizeof(one));
  if (state_->thread.get_id() == std::this_thread::get_id()) {
    state_->thread.detach();
  } else {
    state_->thread.join();
  }
}

void PeerWatch::State::Run() {
  std::vector<pollfd> fds(peers.size() + 1, pollfd{-1, POLLIN, 0});
  fds.back().fd = stop_fd;
  std::vector<bool> is_over(peers.size(), false);
  bool must_look = false;
  const auto end = [&](size_t i) {
    is_over[i] = true;
    if (fds[i].fd >= 0) close(fds[i].fd);
    fds[i].fd = -1;
    if (!stopping.load(std::memory_order_acquire)) ended(i);
  };
  for (size_t i = 0; i < peers.size(); ++i) {
    is_over[i] = peers[i].pid == 0;
    if (is_over[i]) continue;
    fds[i].fd = OpenPeer(peers[i]);
    // Another process may have the id by now.
    if (IsGone(peers[i])) {
      end(i);
    } else if (fds[i].fd < 0) {
      must_look = true;  // a kernel before 5.3, or a sandbox
    }
  }
  while (!stopping.load(std::memory_order_acquire)) {
    const int ready = poll(fds.data(), fds.size(), must_look ? kPollMilliseconds : -1);
    if (ready < 0 && errno != EINTR) break;
    for (size_t i = 0; i < peers.size(); ++i) {
      if (is_over[i]) continue;
      const bool watched = fds[i].fd >= 0;
      if (watched ? (fds[i].revents & POLLIN) != 0 : IsGone(peers[i])) end(i);
    }
  }
  for (size_t i = 0; i < peers.size(); ++i) {
    if (fds[i].fd >= 0) close(fds[i].fd);
  }
}

}  // namespace jaxcomm
