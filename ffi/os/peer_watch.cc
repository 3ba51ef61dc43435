#include "ffi/os/peer_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "ffi/base/status.h"
#include "ffi/os/forked.h"
#include "ffi/os/mutex.h"
#include "ffi/os/start_thread.h"
#include "ffi/os/system_file.h"

namespace jaxcomm {
namespace {

// How often the watch looks for a process that it cannot poll.
constexpr int kPollMilliseconds = 50;
// How long it waits for the others. If its descriptors are closed meanwhile, nothing
// wakes it.
constexpr int kMostMilliseconds = 1000;

// What /proc/<pid>/stat says of a process.
struct ProcessStat {
  char state = 0;  // of its first thread
  uint64_t threads = 0;
  uint64_t start_time = 0;  // in clock ticks after boot

  // A process that is killed may still hold memory of a GPU while its first thread is a
  // zombie: another thread frees it.
  bool has_ended() const { return state == 'X' || (state == 'Z' && threads <= 1); }
};

// None if the file cannot be read. That may have other reasons than a process's end:
// no file descriptors are left, or /proc is hidden.
std::optional<ProcessStat> ReadStat(int64_t pid) {
  const std::string text = ReadSystemFile(StrCat("/proc/", pid, "/stat"));
  // The second field, in parentheses, may hold anything.
  const char* at = std::strrchr(text.c_str(), ')');
  if (at == nullptr || at[1] == 0) return std::nullopt;
  ProcessStat stat;
  stat.state = at[2];
  for (int field = 2; at != nullptr && field < 22; ++field) {
    at = std::strchr(at + 1, ' ');
    if (at != nullptr && field == 19) stat.threads = std::strtoull(at + 1, nullptr, 10);
  }
  if (at == nullptr) return std::nullopt;
  stat.start_time = std::strtoull(at + 1, nullptr, 10);
  return stat;
}

enum class Life { kAlive, kGone, kUnknown };

// Only kGone is proof of an end. Collectives are aborted for it, so a process that
// cannot be looked at must not count as gone.
Life Look(const Peer& peer) {
  if (const auto stat = ReadStat(peer.pid)) {
    if (stat->has_ended()) return Life::kGone;
    const bool is_another = peer.start_time != 0 && stat->start_time != peer.start_time;
    return is_another ? Life::kGone : Life::kAlive;
  }
  // Signal 0 asks whether the process exists, and needs no file descriptor.
  const bool exists = kill(static_cast<pid_t>(peer.pid), 0) == 0 || errno != ESRCH;
  return exists ? Life::kUnknown : Life::kGone;
}

// PIDFD_THREAD, of Linux 6.9; older ones refuse it.
constexpr unsigned kOfThread = O_EXCL;

// Returns a descriptor that poll(2) reports readable once the peer ends. Returns a
// negative number if the system has no such descriptors, or none left.
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

// What the system says of descriptors of ours, and of no files of others.
constexpr char kOfPidfd[] = "\nPid:";
constexpr char kOfEventfd[] = "\neventfd-count:";

// Whether a descriptor is still ours. A program that becomes a daemon closes all, and
// their numbers go to files that it opens later. True also if nobody can say.
bool IsStill(const char* kind, int fd) {
  const std::string text = ReadSystemFile(StrCat("/proc/self/fdinfo/", fd));
  return text.empty() || text.find(kind) != std::string::npos;
}

void Close(const char* kind, int fd) {
  if (fd >= 0 && IsStill(kind, fd)) close(fd);
}

}  // namespace

int64_t SentinelThread() {
  static auto& mutex = *new Mutex;
  static pid_t pid GUARDED_BY(mutex) = 0;
  static int64_t thread GUARDED_BY(mutex) = 0;
  MutexLock lock(mutex);
  // A forked child has none of its parent's threads.
  if (pid == getpid()) return thread;
  thread = 0;
  auto id = std::make_shared<std::promise<int64_t>>();
  const Status started = StartDetached(
      [id] {
        id->set_value(syscall(SYS_gettid));
        while (true) pause();
      },
      "jaxcomm-life");
  if (started.failure()) return 0;
  pid = getpid();
  thread = id->get_future().get();
  return thread;
}

Peer PeerOf(int64_t pid, int process_index) {
  Peer peer;
  peer.pid = pid;
  peer.process_index = process_index;
  if (const auto stat = ReadStat(pid); stat && !stat->has_ended()) {
    peer.start_time = stat->start_time;
  }
  return peer;
}

bool HasEnded(const Peer& peer) {
  const Life life = Look(peer);
  if (life != Life::kAlive || peer.thread == 0) return life == Life::kGone;
  const std::string path = StrCat("/proc/", peer.pid, "/task/", peer.thread);
  return access(path.c_str(), F_OK) != 0 && errno == ENOENT;
}

struct PeerWatch::State {
  std::vector<Peer> peers;
  std::function<void(size_t)> ended;
  std::atomic<bool> stopping{false};
  int stop_fd = -1;  // wakes the thread; without it the thread polls
  std::thread thread;

  ~State() { Close(kOfEventfd, stop_fd); }
  void Run();
};

PeerWatch::PeerWatch(std::vector<Peer> peers, std::function<void(size_t index)> ended)
    : state_(std::make_shared<State>()) {
  state_->peers = std::move(peers);
  state_->ended = std::move(ended);
  state_->stop_fd = eventfd(0, EFD_CLOEXEC);
  // The thread shares the state: the watch may be destroyed by `ended`.
  auto started = StartThread([state = state_] { state->Run(); }, "jaxcomm-peers");
  if (started) {
    state_->thread = std::move(*started);
  } else {
    std::fprintf(stderr,
                 "jaxcomm: %s. Without it nobody watches the other processes of this "
                 "host: if one ends, calls that wait for it fail at their timeout.\n",
                 started.error().message().c_str());
  }
}

PeerWatch::~PeerWatch() {
  // A forked child would wake the parent's thread, and join a thread that it lacks.
  if (IsForked() || !state_->thread.joinable()) return;
  state_->stopping.store(true, std::memory_order_release);
  const uint64_t one = 1;
  if (IsStill(kOfEventfd, state_->stop_fd)) {
    (void)!write(state_->stop_fd, &one, sizeof(one));
  }
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
  // Whether the polled process is known to be the peer, and not a later process of the
  // same id.
  std::vector<bool> is_verified(peers.size(), false);
  for (size_t i = 0; i < peers.size(); ++i) {
    is_over[i] = peers[i].pid == 0;
    is_verified[i] = peers[i].start_time == 0;
  }
  const auto end = [&](size_t i) {
    is_over[i] = true;
    Close(kOfPidfd, fds[i].fd);
    fds[i].fd = -1;
    if (!stopping.load(std::memory_order_acquire)) ended(i);
  };
  bool can_poll = true;
  while (!stopping.load(std::memory_order_acquire)) {
    // Without a descriptor to wake it, the thread must look whether to stop.
    bool must_look = fds.back().fd < 0 || !can_poll;
    for (size_t i = 0; i < peers.size(); ++i) {
      if (is_over[i]) continue;
      // Fails before Linux 5.3, in some sandboxes, and while this process has no
      // descriptors left.
      if (fds[i].fd < 0) fds[i].fd = OpenPeer(peers[i]);
      if (fds[i].fd >= 0 && is_verified[i] && can_poll) continue;
      const Life life = Look(peers[i]);
      if (life == Life::kGone) {
        end(i);
        continue;
      }
      // Opened before the look, so the descriptor is the peer's.
      if (fds[i].fd >= 0 && life == Life::kAlive) is_verified[i] = true;
      must_look |= fds[i].fd < 0 || !is_verified[i];
    }
    const int ready =
        poll(fds.data(), fds.size(), must_look ? kPollMilliseconds : kMostMilliseconds);
    if (ready >= 0) can_poll = true;
    if (ready < 0 && errno != EINTR) {
      // EINVAL if there are more peers than descriptors allowed, or ENOMEM.
      can_poll = false;
      std::this_thread::sleep_for(std::chrono::milliseconds(kPollMilliseconds));
    }
    for (size_t i = 0; ready > 0 && i < peers.size(); ++i) {
      if (is_over[i] || fds[i].revents == 0) continue;
      if ((fds[i].revents & POLLIN) != 0 && IsStill(kOfPidfd, fds[i].fd)) {
        end(i);
      } else {
        // It was closed: the next pass opens another one.
        fds[i].fd = -1;
        is_verified[i] = peers[i].start_time == 0;
      }
    }
    const bool stops = stopping.load(std::memory_order_acquire);
    if (ready > 0 && fds.back().revents != 0 && !stops) fds.back().fd = -1;
  }
  for (size_t i = 0; i < peers.size(); ++i) Close(kOfPidfd, fds[i].fd);
}

}  // namespace jaxcomm
