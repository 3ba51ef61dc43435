// Threads that write, overwrite and read one flight recorder at a time.
#include <signal.h>
#include <sys/time.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "ffi/flight/flight_recorder.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

using State = FlightRecorder::State;

std::unique_ptr<CallSite> Sum(int64_t elements) {
  return MakeSite("all_reduce", {}, {FloatLeaf(elements)}, {FloatLeaf(elements)});
}

// Ranks with kLeastEntries each have the shortest ring.
std::vector<std::vector<int64_t>> ManyRanks() {
  return {std::vector<int64_t>(FlightRecorder::kEntries)};
}

// The tag, the operation and the state of every entry follow from its run: an entry
// made of two operations would show.
TEST(whoever_looks_while_many_threads_write_sees_whole_entries) {
  constexpr int kThreads = 4, kLooks = 200;
  FlightRecorder recorder(ManyRanks());
  auto even = Sum(8), odd = Sum(9);
  std::atomic<bool> looking{true};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = 0; looking || i < FlightRecorder::kEntries; ++i) {
        const int64_t run_id = i * kThreads + t;
        const CallSite& site = i % 2 == 0 ? *even : *odd;
        // A rank of its own and one that all threads write.
        for (int rank : {t, kThreads}) {
          const auto ticket =
              recorder.Start(site.operation(), run_id, ~run_id, 0, rank);
          if (i % 3 != 0) {
            recorder.Finish(ticket, i % 3 == 1 ? State::kCompleted : State::kFailed);
          }
        }
      }
    });
  }
  int64_t looks = 0, torn = 0, of_all = 0;
  while (looks < kLooks || of_all == 0) {
    ++looks;
    for (const auto& entry : recorder.Snapshot()) {
      const int64_t round = entry.run_id / kThreads;
      const State ended = round % 3 == 1 ? State::kCompleted : State::kFailed;
      of_all += entry.rank == kThreads;
      torn += entry.tag != static_cast<uint64_t>(~entry.run_id);
      torn += entry.operation->bytes != (round % 2 == 0 ? 32 : 36);
      torn +=
          entry.state != State::kStarted && (round % 3 == 0 || entry.state != ended);
    }
  }
  looking = false;
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(torn, 0);
  std::vector<int> entries_of(kThreads + 1);
  for (const auto& entry : recorder.Snapshot()) {
    ++entries_of[entry.rank];
    const bool open = entry.run_id / kThreads % 3 == 0;
    CHECK_EQ(entry.state == State::kStarted, open);
  }
  for (int t = 0; t < kThreads; ++t) {
    CHECK_EQ(entries_of[t], FlightRecorder::kLeastEntries);
  }
}

// The timer's handler writes a full ring and a little more.
FlightRecorder* interrupted = nullptr;
const CallSite* sites[2];
volatile int64_t interrupting_run = 1;

FlightRecorder::Ticket StartRun(int64_t run_id, int rank) {
  return interrupted->Start(sites[run_id % 2]->operation(), run_id, ~run_id, 0, rank);
}

void Interrupt(int) {
  for (int i = 0; i < FlightRecorder::kLeastEntries + 3; ++i) {
    StartRun(interrupting_run, 0);
    interrupting_run = interrupting_run + 1;
  }
}

// Threads rarely meet in the few nanoseconds that matter; a timer that stops the one
// thread there is, and does what another thread might, often does.
TEST(no_entry_is_of_two_operations_wherever_a_thread_is_stopped) {
  FlightRecorder recorder(ManyRanks());
  auto even = Sum(8), odd = Sum(9);
  interrupted = &recorder;
  sites[0] = even.get();
  sites[1] = odd.get();
  StartRun(1, 0);  // the one that allocates
  struct sigaction before, ours = {};
  ours.sa_handler = &Interrupt;
  ours.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &ours, &before);
  const itimerval often = {{0, 50}, {0, 50}}, never = {};
  setitimer(ITIMER_REAL, &often, nullptr);
  int64_t mixed = 0;
  // On a busy machine, under ThreadSanitizer, the timer leaves it little time.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (int64_t i = 0; i < 4000 && std::chrono::steady_clock::now() < end; ++i) {
    // Runs of its own, which the handler never counts up to.
    for (int64_t k = 0; k < 20; ++k) StartRun((int64_t{1} << 40) + 20 * i + k, 0);
    for (const auto& entry : recorder.Snapshot()) {
      mixed += entry.tag != static_cast<uint64_t>(~entry.run_id);
      mixed += entry.operation->bytes != (entry.run_id % 2 == 0 ? 32 : 36);
    }
  }
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  CHECK_EQ(mixed, 0);
  CHECK_TRUE(interrupting_run > 1);
}

}  // namespace
}  // namespace jaxcomm::testing
