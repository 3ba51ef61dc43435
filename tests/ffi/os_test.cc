// What the system tells: how many cores this process may use, in copies of Linux's file
// trees, and the end of other processes.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>

#include "ffi/os/cores.h"
#include "ffi/os/peer_watch.h"
#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

// A root folder that is gone afterwards.
struct Root {
  Root() {
    char name[] = "/tmp/os_test.XXXXXX";
    path = mkdtemp(name);
  }
  ~Root() { std::filesystem::remove_all(path); }
  void Write(const std::string& file, const std::string& text) const {
    const std::filesystem::path full = path + file;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  double Quota() const { return CpuQuota(path); }
  std::string path;
};

TEST(the_smallest_quota_of_the_cgroups_above_counts) {
  Root root;
  CHECK_TRUE(std::isinf(root.Quota()));
  root.Write("/proc/self/cgroup", "0::/job/step/task\n");
  root.Write("/sys/fs/cgroup/cpu.max", "max 100000\n");
  CHECK_TRUE(std::isinf(root.Quota()));
  root.Write("/sys/fs/cgroup/cpu.max", "1600000 100000\n");
  CHECK_EQ(root.Quota(), 16.0);
  root.Write("/sys/fs/cgroup/job/step/task/cpu.max", "800000 100000\n");
  root.Write("/sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  CHECK_EQ(root.Quota(), 1.5);
}

TEST(version_1_of_cgroups_has_its_own_files) {
  Root root;
  root.Write("/proc/self/cgroup", "3:cpuset:/a\n2:cpu,cpuacct:/docker/id\n0::/\n");
  // A container sees its own group mounted at the top, whatever /proc says.
  root.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  root.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "50000\n");
  CHECK_TRUE(std::isinf(root.Quota()));
  root.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "100000\n");
  CHECK_EQ(root.Quota(), 2.0);
}

TEST(a_broken_file_is_no_quota) {
  Root root;
  root.Write("/proc/self/cgroup", "::::\n\n0::no/slash\nx\n0::/\n");
  for (const char* text : {"100000\n", "0 0\n"}) {
    root.Write("/sys/fs/cgroup/cpu.max", text);
    CHECK_TRUE(std::isinf(root.Quota()));
  }
}

TEST(only_whole_cores_count_and_at_least_one) {
  CHECK_EQ(UsableCores(96, INFINITY), 96);
  CHECK_EQ(UsableCores(96, 3.9), 3);
  CHECK_EQ(UsableCores(96, 0.5), 1);
  CHECK_EQ(UsableCores(2, 8.0), 2);
  CHECK_EQ(UsableCores(0, INFINITY), 1);
}

// A child that says the ids of its life thread and of another thread, which ends when
// it is asked to, and lives until it is killed.
struct Living {
  Living() {
    CHECK_EQ(pipe(told), 0);
    CHECK_EQ(pipe(asked), 0);
    child = std::make_unique<Child>([&] {
      std::promise<int64_t> other;
      std::thread([&] {
        other.set_value(syscall(SYS_gettid));
        char byte;
        (void)!read(asked[0], &byte, 1);
      }).detach();
      const int64_t ids[] = {SentinelThread(), other.get_future().get()};
      (void)!write(told[1], ids, sizeof(ids));
      Forever();
    });
    int64_t ids[2] = {};
    CHECK_EQ(read(told[0], ids, sizeof(ids)), static_cast<ssize_t>(sizeof(ids)));
    life = ids[0];
    other = ids[1];
  }
  ~Living() {
    for (int end : {told[0], told[1], asked[0], asked[1]}) close(end);
  }
  void EndOther() { CHECK_EQ(write(asked[1], "x", 1), 1); }
  void Kill() { child->Kill(); }
  Peer PeerWith(int64_t thread) const {
    Peer peer = PeerOf(child->pid(), 1);
    peer.thread = thread;
    return peer;
  }

  int told[2], asked[2];
  std::unique_ptr<Child> child;
  int64_t life = 0, other = 0;
};

// A watch, and how many ends it told.
struct Counting {
  explicit Counting(std::vector<Peer> peers)
      : watch(std::move(peers), [this](size_t) { ++ended; }) {}
  bool TellsNothing() const {
    LetOthersRun();
    return ended == 0;
  }
  bool Tells() const {
    return Until([this] { return ended == 1; });
  }
  std::atomic<int> ended{0};
  PeerWatch watch;
};

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

TEST(ends_and_only_ends_are_told_while_no_descriptors_are_left) {
  for (const bool stays : {false, true}) {
    Living child;
    const Peer peer = child.PeerWith(child.life);
    auto limit = std::make_unique<NoDescriptors>();
    Counting watch({peer});
    CHECK_TRUE(watch.TellsNothing());
    if (!stays) limit.reset();
    CHECK_TRUE(watch.TellsNothing());
    child.Kill();
    CHECK_TRUE(watch.Tells());
  }
}

TEST(a_watch_over_more_processes_than_descriptors_goes_on) {
  Living child;
  const Peer nobody;
  const std::vector<Peer> peers = {child.PeerWith(0), nobody, nobody, nobody, nobody};
  NoDescriptors limit;
  Counting watch(peers);
  CHECK_TRUE(watch.TellsNothing());
  child.Kill();
  CHECK_TRUE(watch.Tells());
}

#endif

// As a program that becomes a daemon. In a process of its own: nothing else of it goes
// on.
TEST_ALONE(a_watch_whose_descriptors_were_closed_goes_on, EXIT_SUCCESS) {
  for (const bool are_taken : {false, true}) {
    Living child;
    Counting watch({child.PeerWith(child.life)}), other({PeerOf(getpid(), 0)});
    CHECK_TRUE(watch.TellsNothing());
    const int first = child.told[0];
    for (int fd = first; fd < first + 20; ++fd) close(fd);
    int files[20];
    for (int i = 0; i < 20 && are_taken; ++i) {
      // The numbers go to files that can be read at any time.
      files[i] = open("/proc/self/stat", O_RDONLY);
      CHECK_TRUE(files[i] >= first);
    }
    CHECK_TRUE(watch.TellsNothing());
    child.Kill();
    CHECK_TRUE(watch.Tells());
    CHECK_TRUE(other.TellsNothing());
    for (int i = 0; i < 20 && are_taken; ++i) CHECK_EQ(close(files[i]), 0);
  }
}

TEST(a_later_process_of_the_same_id_is_not_the_peer) {
  Living child;
  Peer peer = child.PeerWith(0);
  --peer.start_time;
  CHECK_TRUE(Counting({peer}).Tells());
}

TEST(a_killed_process_is_told_once) {
  for (const bool has_thread : {false, true}) {
    Living child;
    const Peer peer = child.PeerWith(has_thread ? child.life : 0);
    Counting watch({peer});
    CHECK_TRUE(watch.TellsNothing());
    child.Kill();
    CHECK_TRUE(watch.Tells());
    LetOthersRun();
    CHECK_EQ(watch.ended.load(), 1);
    // One that has ended before is told, too.
    CHECK_TRUE(Counting({peer}).Tells());
  }
}

// The process ends later, since the system frees its memory first.
TEST(the_end_of_the_thread_is_what_counts) {
  const auto fd = syscall(SYS_pidfd_open, getpid(), 0200);
  if (fd < 0) return;  // Linux 6.9 and newer watch one thread
  close(static_cast<int>(fd));
  Living child;
  Counting watch({child.PeerWith(child.other)});
  CHECK_TRUE(watch.TellsNothing());
  child.EndOther();
  CHECK_TRUE(watch.Tells());
  CHECK_TRUE(PeerOf(child.child->pid(), 1).start_time != 0);
}

TEST(whoever_asks_is_told_of_an_end_and_of_nothing_else) {
  Living child;
  Peer peer = child.PeerWith(child.other);
  CHECK_TRUE(!HasEnded(peer));
  CHECK_TRUE(!HasEnded(child.PeerWith(0)));
  child.EndOther();
  CHECK_TRUE(Until([&] { return HasEnded(peer); }));
  peer.thread = child.life;
  CHECK_TRUE(!HasEnded(peer));
  // It has ended, whenever its parent asks how: until then it is a zombie.
  peer.thread = 0;
  CHECK_EQ(kill(peer.pid, SIGKILL), 0);
  siginfo_t info;
  CHECK_EQ(waitid(P_PID, peer.pid, &info, WEXITED | WNOWAIT), 0);
  CHECK_TRUE(HasEnded(peer));
  CHECK_EQ(PeerOf(peer.pid, 1).start_time, uint64_t{0});
  child.Kill();
  CHECK_TRUE(HasEnded(peer));
}

// As one that is killed while another of its threads has yet to free memory of a GPU.
TEST(a_process_lives_as_long_as_one_of_its_threads) {
  int told[2], asked[2];
  CHECK_EQ(pipe(told), 0);
  CHECK_EQ(pipe(asked), 0);
  Child child([&] {
    (void)SentinelThread();
    char byte = 0;
    (void)!write(told[1], &byte, 1);
    (void)!read(asked[0], &byte, 1);
    syscall(SYS_exit, 0);
  });
  char byte = 0;
  CHECK_EQ(read(told[0], &byte, 1), 1);
  const Peer peer = PeerOf(child.pid(), 1);
  CHECK_EQ(write(asked[1], "x", 1), 1);
  // Its first thread is a zombie then.
  CHECK_TRUE(Until([&] {
    std::ifstream file("/proc/" + std::to_string(peer.pid) + "/stat");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    return text.find(") Z ") != std::string::npos;
  }));
  CHECK_TRUE(!HasEnded(peer));
  CHECK_EQ(PeerOf(peer.pid, 1).start_time, peer.start_time);
  {
    Counting watch({peer});
    CHECK_TRUE(watch.TellsNothing());
    CHECK_EQ(kill(child.pid(), SIGKILL), 0);
    CHECK_TRUE(watch.Tells());
  }
  CHECK_TRUE(HasEnded(peer));
  for (int end : {told[0], told[1], asked[0], asked[1]}) close(end);
}

TEST(a_thread_of_somebody_else_s_is_not_watched) {
  Living child, other;
  Counting watch({child.PeerWith(other.life)});
  other.Kill();
  CHECK_TRUE(watch.TellsNothing());
  child.Kill();
  CHECK_TRUE(watch.Tells());
}

TEST(the_sentinel_thread_is_one) {
  const int64_t thread = SentinelThread();
  CHECK_EQ(SentinelThread(), thread);
  CHECK_TRUE(thread != getpid());
#ifndef __SANITIZE_THREAD__  // it ends a forked child that begins a thread
  CHECK_EQ(Child([&] { CHECK_TRUE(SentinelThread() != thread); }).Wait(), EXIT_SUCCESS);
#endif
}

}  // namespace
}  // namespace jaxcomm::testing
