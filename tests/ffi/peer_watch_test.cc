// Tests that a PeerWatch reports the end of the processes that it watches.
#include "ffi/os/peer_watch.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

// A child that says the ids of its life thread and of another thread, which ends when
// it is asked to, and lives until it is killed.
struct Child {
  Child() {
    CHECK_EQ(pipe(told), 0);
    CHECK_EQ(pipe(asked), 0);
    pid = fork();
    if (pid == 0) {
      std::promise<int64_t> other;
      std::thread([&] {
        other.set_value(syscall(SYS_gettid));
        char byte;
        (void)!read(asked[0], &byte, 1);
      }).detach();
      const int64_t ids[] = {SentinelThread(), other.get_future().get()};
      (void)!write(told[1], ids, sizeof(ids));
      while (true) pause();
    }
    int64_t ids[2] = {};
    CHECK_EQ(read(told[0], ids, sizeof(ids)), static_cast<ssize_t>(sizeof(ids)));
    life = ids[0];
    other = ids[1];
  }
  ~Child() {
    Kill();
    for (int* ends : {told, asked}) {
      close(ends[0]);
      close(ends[1]);
    }
  }
  void EndOther() { CHECK_EQ(write(asked[1], "x", 1), 1); }
  void Kill() {
    if (pid > 0) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    pid = 0;
  }
  Peer PeerWith(int64_t thread) const {
    Peer peer = PeerOf(pid, 1);
    peer.thread = thread;
    return peer;
  }

  int told[2], asked[2];
  pid_t pid = 0;
  int64_t life = 0, other = 0;
};

// Whether the system lets one thread be watched: Linux 6.9 and newer.
bool WatchesThreads() {
  const auto fd = syscall(SYS_pidfd_open, getpid(), 0200);
  if (fd >= 0) close(static_cast<int>(fd));
  return fd >= 0;
}

// Sanitizers open pipes of their own: UBSan takes a refused one for invalid memory.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

// While it lives, this process can open no file, and has no descriptor left for another
// purpose.
class NoDescriptors {
 public:
  NoDescriptors() {
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit none = before_;
    none.rlim_cur = 3;  // poll(2) refuses more entries than this
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    CHECK_EQ(dup(0), -1);
  }
  ~NoDescriptors() { CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }

 private:
  rlimit before_;
};

TEST(a_living_process_is_not_ended_while_no_descriptors_are_left) {
  Child child;
  const Peer peer = child.PeerWith(child.life);
  std::atomic<int> ended{0};
  auto limit = std::make_unique<NoDescriptors>();
  PeerWatch watch({peer}, [&](size_t) { ++ended; });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK_EQ(ended.load(), 0);
  limit.reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK_EQ(ended.load(), 0);
  child.Kill();
  CHECK_TRUE(Comes([&] { return ended.load() == 1; }));
}

TEST(an_end_is_told_while_no_descriptors_are_left) {
  Child child;
  const Peer peer = child.PeerWith(child.life);
  std::atomic<int> ended{0};
  NoDescriptors limit;
  PeerWatch watch({peer}, [&](size_t) { ++ended; });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK_EQ(ended.load(), 0);
  child.Kill();
  CHECK_TRUE(Comes([&] { return ended.load() == 1; }));
}

TEST(a_watch_over_more_processes_than_descriptors_goes_on) {
  Child child;
  const Peer nobody;
  const std::vector<Peer> peers = {child.PeerWith(0), nobody, nobody, nobody, nobody};
  std::atomic<int> ended{0};
  NoDescriptors limit;
  PeerWatch watch(peers, [&](size_t) { ++ended; });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK_EQ(ended.load(), 0);
  child.Kill();
  CHECK_TRUE(Comes([&] { return ended.load() == 1; }));
}

#endif

TEST(a_later_process_of_the_same_id_is_not_the_peer) {
  Child child;
  Peer peer = child.PeerWith(0);
  --peer.start_time;
  std::atomic<int> ended{0};
  PeerWatch watch({peer}, [&](size_t) { ++ended; });
  CHECK_TRUE(Comes([&] { return ended.load() == 1; }));
}

TEST(a_killed_process_is_told_once) {
  for (const bool has_thread : {false, true}) {
    Child child;
    std::atomic<int> ended{0};
    {
      PeerWatch watch({child.PeerWith(has_thread ? child.life : 0)},
                      [&](size_t) { ++ended; });
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      CHECK_EQ(ended.load(), 0);
      child.Kill();
      CHECK_TRUE(Comes([&] { return ended.load() > 0; }));
    }
    CHECK_EQ(ended.load(), 1);
  }
}

TEST(a_process_that_has_ended_is_told) {
  Child child;
  const Peer peer = child.PeerWith(child.life);
  child.Kill();
  std::atomic<int> ended{0};
  PeerWatch watch({peer}, [&](size_t) { ++ended; });
  CHECK_TRUE(Comes([&] { return ended.load() == 1; }));
}

// The process ends later, since the system frees its memory first.
TEST(the_end_of_the_thread_is_what_counts) {
  if (!WatchesThreads()) return;
  Child child;
  std::atomic<int> ended{0};
  PeerWatch watch({child.PeerWith(child.other)}, [&](size_t) { ++ended; });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_EQ(ended.load(), 0);
  child.EndOther();
  CHECK_TRUE(Comes([&] { return ended.load() == 1; }));
  CHECK_TRUE(PeerOf(child.pid, 1).start_time != 0);
}

TEST(a_thread_of_somebody_else_s_is_not_watched) {
  Child child, other;
  std::atomic<int> ended{0};
  PeerWatch watch({child.PeerWith(other.life)}, [&](size_t) { ++ended; });
  other.Kill();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK_EQ(ended.load(), 0);
  child.Kill();
  CHECK_TRUE(Comes([&] { return ended.load() == 1; }));
}

TEST(the_sentinel_thread_is_one_and_takes_no_signals) {
  const int64_t thread = SentinelThread();
  CHECK_EQ(SentinelThread(), thread);
  CHECK_TRUE(thread != getpid());
  std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
  std::string line, blocked;
  while (std::getline(status, line)) {
    if (line.rfind("SigBlk:", 0) == 0) blocked = line;
  }
  // All but SIGKILL, SIGSTOP, and two of the C library's.
  CHECK_CONTAINS(blocked, "fffffffe");
#ifndef __SANITIZE_THREAD__  // it ends a forked child that begins a thread
  const pid_t child = fork();
  if (child == 0) _exit(SentinelThread() == thread ? 1 : 0);
  int result = -1;
  CHECK_EQ(waitpid(child, &result, 0), child);
  CHECK_EQ(result, 0);
#endif
}

}  // namespace
}  // namespace jaxcomm::testing
