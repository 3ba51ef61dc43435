// What ranks did last: single entries, rings, and threads that write, overwrite and
// read one recorder at a time.
#include "ffi/flight/flight_recorder.h"

#include <signal.h>
#include <sys/time.h>

#include <algorithm>
#include <new>

#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace {
thread_local int64_t allocations = 0;
}  // namespace

// Not inlined: g++ would compare what it sees of one with what it knows of the other.
[[gnu::noinline]] void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace jaxcomm::testing {
namespace {

using State = FlightRecorder::State;
constexpr int kEntries = FlightRecorder::kEntries;

std::unique_ptr<CallSite> Sum(int64_t elements) {
  return FloatSite("all_reduce", {}, elements);
}

std::vector<std::vector<int64_t>> OneRank() { return {std::vector<int64_t>{0}}; }

// Each rank has only kLeastEntries.
std::vector<std::vector<int64_t>> ManyRanks() {
  return {std::vector<int64_t>(kEntries)};
}

TEST(an_entry_stays_as_it_first_ended_and_takes_as_long_as_it_took) {
  FlightRecorder recorder(OneRank());
  auto site = Sum(1);
  const auto failed = recorder.Start(site->operation(), 0, 1, 0, 0);
  const auto completed = recorder.Start(site->operation(), 0, 1, 0, 0);
  recorder.Start(site->operation(), 0, 1, 0, 0);
  recorder.Finish(completed, State::kCompleted);
  const Stopwatch begin;
  LetOthersRun();
  const double took = begin.seconds();
  recorder.Finish(failed, State::kFailed);
  recorder.Finish(failed, State::kCompleted);
  const auto entries = recorder.Snapshot();
  CHECK_EQ(entries.size(), 3u);
  CHECK_TRUE(entries[0].state == State::kFailed);
  CHECK_TRUE(entries[1].state == State::kCompleted);
  CHECK_TRUE(entries[2].state == State::kStarted);
  CHECK_TRUE(entries[0].seconds >= took * 0.999);
  CHECK_TRUE(entries[0].seconds >= entries[1].seconds);
  CHECK_EQ(entries[2].seconds, 0.0);
}

TEST(the_ring_keeps_the_last_operations_oldest_first) {
  FlightRecorder recorder(OneRank());
  CHECK_EQ(recorder.entries_per_rank(), kEntries);
  auto site = Sum(1);
  constexpr int kExtra = 100;
  std::vector<FlightRecorder::Ticket> tickets;
  for (int i = 0; i < kEntries + kExtra; ++i) {
    tickets.push_back(recorder.Start(site->operation(), i, 1, 0, 0));
  }
  // Overwritten: must not mark the entry that took its slot.
  recorder.Finish(tickets[kExtra - 1], State::kFailed);
  recorder.SetRun(tickets[kExtra - 1], 7777);
  recorder.Finish(tickets[kExtra], State::kCompleted);
  recorder.SetRun(tickets[kExtra], 8888);
  const auto entries = recorder.Snapshot();
  CHECK_EQ(entries.size(), static_cast<size_t>(kEntries));
  for (size_t i = 0; i < entries.size(); ++i) {
    CHECK_EQ(entries[i].sequence, kExtra + i + 1);
    CHECK_EQ(entries[i].run_id, i == 0 ? 8888 : static_cast<int64_t>(kExtra + i));
    CHECK_TRUE(entries[i].state == (i == 0 ? State::kCompleted : State::kStarted));
  }
}

TEST(a_record_outlives_its_call_site_and_equal_sites_share_a_description) {
  FlightRecorder recorder(OneRank());
  const uint32_t first = Sum(6)->operation();
  recorder.Start(first, 0, 1, 0, 0);
  CHECK_EQ(recorder.Snapshot()[0].operation->operands, "float32[6]");
  // The second time it adds nothing.
  const uint32_t next = Sum(600)->operation();
  CHECK_EQ(Sum(6)->operation(), first);
  CHECK_EQ(Sum(601)->operation(), next + 1);
  // Another permutation is another operation, though it reads the same.
  CHECK_TRUE(FloatSite("permute", {-1, 0}, 3)->operation() !=
             FloatSite("permute", {1, -1}, 3)->operation());
}

TEST(no_operation_but_a_ranks_first_allocates) {
  FlightRecorder recorder({{0, 1}});
  auto site = Sum(1);
  const int64_t idle = recorder.host_bytes();
  recorder.Finish(recorder.Start(site->operation(), 0, 1, 0, 0), State::kCompleted);
  const int64_t used = recorder.host_bytes();
  CHECK_TRUE(used > idle);
  const int64_t before = allocations;
  for (int i = 0; i < 5000; ++i) {
    recorder.Finish(recorder.Start(site->operation(), i, 1, 0, 0), State::kCompleted);
  }
  CHECK_EQ(allocations, before);
  CHECK_EQ(recorder.host_bytes(), used);
}

TEST(threads_write_rings_of_their_own_and_one_together_while_others_look) {
  constexpr int kThreads = 4;
  FlightRecorder recorder(ManyRanks());
  auto site = Sum(8);
  std::atomic<int> writing{kThreads};
  std::thread looks([&] {
    while (writing > 0) recorder.Snapshot();
  });
  ForRanks(kThreads, [&](int t) {
    for (int64_t run = 0; run < kEntries; ++run) {
      for (int rank : {t, kThreads}) {
        recorder.Finish(recorder.Start(site->operation(), run, 1, 0, rank),
                        State::kCompleted);
      }
    }
    --writing;
  });
  looks.join();
  std::vector<int> entries_of(kThreads + 1);
  for (const auto& entry : recorder.Snapshot()) {
    ++entries_of[entry.rank];
    CHECK_TRUE(entry.state == State::kCompleted);
  }
  for (int count : entries_of) CHECK_EQ(count, FlightRecorder::kLeastEntries);
}

// The timer's handler writes a full ring and a little more.
FlightRecorder* interrupted = nullptr;
const CallSite* sites[2];
volatile int64_t interrupting_run = 1;
volatile int interruptions = 0;

void StartRun(int64_t run_id) {
  interrupted->Start(sites[run_id % 2]->operation(), run_id, ~run_id, 0, 0);
}

void Interrupt(int) {
  interruptions = interruptions + 1;
  for (int i = 0; i < FlightRecorder::kLeastEntries + 3; ++i) {
    StartRun(interrupting_run);
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
  StartRun(1);  // the one that allocates
  struct sigaction before, ours = {};
  ours.sa_handler = &Interrupt;
  ours.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &ours, &before);
  const itimerval often = {{0, 50}, {0, 50}}, never = {};
  setitimer(ITIMER_REAL, &often, nullptr);
  int64_t mixed = 0;
  for (int64_t i = 0; interruptions < 3000; ++i) {
    // Runs of its own, which the handler never counts up to.
    for (int64_t k = 0; k < 20; ++k) StartRun((int64_t{1} << 40) + 20 * i + k);
    for (const auto& entry : recorder.Snapshot()) {
      mixed += entry.tag != static_cast<uint64_t>(~entry.run_id);
      mixed += entry.operation->bytes != (entry.run_id % 2 == 0 ? 32 : 36);
    }
  }
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  CHECK_EQ(mixed, 0);
}

}  // namespace
}  // namespace jaxcomm::testing
