// A system that starts no more threads. It is played by this program's own
// pthread_create(), in the place of the C library's.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include <cerrno>

#include "ffi/backends/host/arena/process_set.h"
#include "ffi/backends/host/local/continuer.h"
#include "ffi/backends/host/local/local_communicator.h"
#include "ffi/flight/dump_signal.h"
#include "tests/ffi/processes.h"

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
  auto site = FloatSite("all_reduce", {}, 2);
  std::shared_ptr<Communicator> communicator;
  {
    NoThreads refused;
    communicator = MakeLocalCommunicator(Spec({{100, 101}}, kExpires));
  }
  RankBuffers zero(2, 2, 1);
  Outcome outcome;
  zero.Arrive(*communicator, site.get(), 1, 100, &outcome);
  CHECK_CONTAINS(outcome.Wait(), kRefused);
  // Nor does one wait for others that has all threads but that of the timeouts.
  CHECK_OK(StartContinuing());
  {
    NoThreads refused;
    communicator = MakeLocalCommunicator(Spec({{100, 101}}, kExpires));
  }
  RankBuffers unwatched(2, 2, 1);
  Outcome never;
  unwatched.Arrive(*communicator, site.get(), 1, 100, &never);
  CHECK_TRUE(never.done());
  if (never.done()) CHECK_CONTAINS(never.Wait(), kRefused);
  // The next one has its threads, that of the timeouts among them.
  communicator = MakeLocalCommunicator(Spec({{100, 101}}, kExpires));
  RankBuffers again(2, 2, 1);
  Outcome late;
  again.Arrive(*communicator, site.get(), 1, 100, &late);
  CHECK_CONTAINS(late.Wait(), "waited 1 s for rank 1");
}

TEST(a_crossing_that_no_thread_can_carry_on_fails) {
  {
    NoThreads refused;
    Processes processes(Blocks(2, 1));
    Calls alone(processes, "all_reduce", {}, 4, 1);
    for (int rank : {0, 1}) {
      alone.Begin(rank);
      CHECK_CONTAINS(alone.End(rank), kRefused);
    }
  }
  Processes processes(Blocks(2, 1));
  Calls sum(processes, "all_reduce", {}, 4, 2);
  sum.BeginAll();
  sum.EndAll();
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

}  // namespace
}  // namespace jaxcomm::testing

#endif
