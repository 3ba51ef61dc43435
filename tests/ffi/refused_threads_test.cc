// A system that starts no more threads. It is played by this program's own
// pthread_create(), in the place of the C library's.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/host/local_communicator.h"
#include "ffi/backends/host/process_set.h"
#include "ffi/flight/dump_signal.h"
#include "ffi/os/peer_watch.h"
#include "tests/ffi/check.h"
#include "tests/ffi/processes.h"
#include "tests/ffi/ranks.h"

// Sanitizers need a pthread_create() of their own.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

namespace {
std::atomic<bool> refuses{false};
}  // namespace

extern "C" __attribute__((visibility("default"))) int pthread_create(
    pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
    void* argument) {
  if (refuses) return EAGAIN;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create =
      reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, body, argument);
}

namespace jaxcomm::testing {
namespace {

struct NoThreads {
  NoThreads() { refuses = true; }
  ~NoThreads() { refuses = false; }
};

constexpr char kRefused[] = "cannot start a thread: Resource temporarily unavailable";

// The tests depend on their order: the first one finds no thread of the library.
TEST(a_communicator_without_threads_fails_its_calls) {
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(2)}, {FloatLeaf(2)});
  std::shared_ptr<Communicator> communicator;
  {
    NoThreads refused;
    communicator = MakeLocalCommunicator(Spec({{100, 101}}, 0.2));
  }
  RankBuffers zero(2, 2, 1);
  Outcome outcome;
  zero.Arrive(*communicator, site.get(), 1, 100, nullptr, &outcome);
  CHECK_CONTAINS(outcome.Wait(), kRefused);
  // The next one has its threads, that of the timeouts among them.
  communicator = MakeLocalCommunicator(Spec({{100, 101}}, 0.2));
  RankBuffers again(2, 2, 1);
  Outcome late;
  again.Arrive(*communicator, site.get(), 1, 100, nullptr, &late);
  CHECK_CONTAINS(late.Wait(), "waited 0.2 s for rank 1");
}

TEST(ranks_go_on_with_the_threads_there_are) {
  // The only thread runs the first rank's program, which waits for the second rank's.
  auto communicator = MakeLocalCommunicator(Spec({{100, 101, 102}}));
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(2)}, {FloatLeaf(2)});
  std::deque<RankBuffers> ranks(3, {2, 2, 1.0f});
  std::atomic<int> gone_on{0}, released{0}, helped{0};
  NoThreads refused;
  for (int r = 0; r < 3; ++r) {
    const void* operands[] = {ranks[r].operand.data()};
    void* results[] = {ranks[r].result.data()};
    communicator
        ->Execute(Call{site.get(), 1, 1, 1, 100 + r, operands, results, nullptr})
        .OnReady([&, r](const std::optional<xla::ffi::Error>&) {
          ++gone_on;
          helped += Comes([&] { return gone_on == 3; });
          ++released;
        });
  }
  CHECK_TRUE(Comes([&] { return released == 3; }));
  CHECK_EQ(helped.load(), 3);
}

TEST(a_crossing_that_no_thread_can_carry_on_fails) {
  std::unique_ptr<Processes> processes;
  {
    NoThreads refused;
    processes = std::make_unique<Processes>(Blocks(2, 1));
    Calls alone(*processes, "all_reduce", {}, 4, 1);
    alone.Begin(0);
    CHECK_CONTAINS(alone.End(0), kRefused);
    alone.Begin(1);
    CHECK_CONTAINS(alone.End(1), kRefused);
  }
  Calls sum(*processes, "all_reduce", {}, 4, 2);
  sum.BeginAll();
  for (int rank : {0, 1}) CHECK_EQ(sum.End(rank), "");
}

TEST(a_signal_that_no_thread_can_answer_keeps_its_action) {
  const auto action = [] {
    struct sigaction current;
    sigaction(SIGUSR1, nullptr, &current);
    return current.sa_handler;
  };
  {
    NoThreads refused;
    CHECK_TRUE(!AnswerDumpSignal());
  }
  CHECK_TRUE(action() == SIG_DFL);
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  CHECK_EQ(sigismember(&blocked, SIGINT), 0);
  CHECK_TRUE(AnswerDumpSignal());
  CHECK_TRUE(action() != SIG_DFL);
}

TEST(processes_are_not_watched_without_a_thread) {
  const pid_t child = fork();
  if (child == 0) {
    while (true) pause();
  }
  const Peer peer = PeerOf(child, 1);
  std::atomic<int> ended{0};
  {
    auto refused = std::make_unique<NoThreads>();
    CHECK_EQ(SentinelThread(), 0);
    PeerWatch watch({peer}, [&](size_t) { ++ended; });
    refused.reset();
    CHECK_TRUE(SentinelThread() != 0);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  CHECK_EQ(ended.load(), 0);
  PeerWatch watch({peer}, [&](size_t) { ++ended; });
  CHECK_TRUE(Comes([&] { return ended == 1; }));
}

}  // namespace
}  // namespace jaxcomm::testing

#endif
