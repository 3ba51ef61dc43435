#include "ffi/flight/flight_recorder.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

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

std::unique_ptr<CallSite> Sum(int64_t elements) {
  return MakeSite("all_reduce", {}, {FloatLeaf(elements)}, {FloatLeaf(elements)});
}

std::vector<std::vector<int64_t>> OneRank() { return {std::vector<int64_t>{0}}; }

// Each rank has only kLeastEntries.
std::vector<std::vector<int64_t>> ManyRanks() {
  return {std::vector<int64_t>(FlightRecorder::kEntries)};
}

TEST(an_entry_says_what_which_rank_did) {
  FlightRecorder recorder({{10, 11}, {12, 13}});
  auto site = MakeSite("all_gather", {0}, {FloatLeaf(4), FloatLeaf(0)}, {FloatLeaf(8)});
  const double before =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  recorder.Finish(recorder.Start(site->operation(), 7, 0xabc, 1, 1), State::kCompleted);
  const auto entries = recorder.Snapshot();
  CHECK_EQ(entries.size(), 1u);
  const auto& entry = entries[0];
  CHECK_EQ(entry.sequence, 1u);
  CHECK_EQ(entry.run_id, 7);
  CHECK_EQ(entry.tag, 0xabcu);
  CHECK_EQ(entry.group, 1);
  CHECK_EQ(entry.rank, 1);
  CHECK_EQ(entry.device, 13);
  CHECK_TRUE(entry.state == State::kCompleted);
  CHECK_EQ(entry.operation->collective, "all_gather");
  CHECK_EQ(entry.operation->name, "all_gather");
  CHECK_EQ(entry.operation->operands, "float32[4], float32[0]");
  CHECK_EQ(entry.operation->dtype, "float32");
  CHECK_EQ(entry.operation->bytes, 16);
  CHECK_EQ(entry.operation->signature, site->signature());
  CHECK_TRUE(entry.started > before - 1 && entry.started < before + 60);
}

TEST(every_rank_counts_its_own_operations) {
  FlightRecorder recorder({{0, 1}, {2}});
  auto site = Sum(1);
  for (int i = 0; i < 3; ++i) recorder.Start(site->operation(), i, 1, 0, 1);
  recorder.Start(site->operation(), 0, 1, 0, 0);
  recorder.Start(site->operation(), 0, 1, 1, 0);
  std::vector<uint64_t> last(3);
  for (const auto& entry : recorder.Snapshot()) {
    last[entry.device] = std::max(last[entry.device], entry.sequence);
  }
  CHECK_EQ(last[0], 1u);
  CHECK_EQ(last[1], 3u);
  CHECK_EQ(last[2], 1u);
}

TEST(an_entry_stays_as_it_first_ended) {
  FlightRecorder recorder(OneRank());
  auto site = Sum(1);
  const auto failed = recorder.Start(site->operation(), 0, 1, 0, 0);
  const auto completed = recorder.Start(site->operation(), 0, 1, 0, 0);
  recorder.Start(site->operation(), 0, 1, 0, 0);
  recorder.Finish(completed, State::kCompleted);
  recorder.Finish(failed, State::kFailed);
  recorder.Finish(failed, State::kCompleted);
  const auto entries = recorder.Snapshot();
  CHECK_EQ(entries.size(), 3u);
  CHECK_TRUE(entries[0].state == State::kFailed);
  CHECK_TRUE(entries[1].state == State::kCompleted);
  CHECK_TRUE(entries[2].state == State::kStarted);
  // The first ended last.
  CHECK_TRUE(entries[0].seconds >= entries[1].seconds);
  CHECK_EQ(entries[2].seconds, 0.0);
}

TEST(times_are_those_of_the_wall_clock) {
  FlightRecorder recorder(OneRank());
  auto site = Sum(1);
  const auto ticket = recorder.Start(site->operation(), 0, 1, 0, 0);
  const auto begin = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const double took =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  recorder.Finish(ticket, State::kCompleted);
  // No upper bound: a busy machine may hold this thread up before Finish.
  CHECK_TRUE(recorder.Snapshot()[0].seconds >= took * 0.999);
}

TEST(the_ring_keeps_the_last_operations_oldest_first) {
  FlightRecorder recorder(OneRank());
  CHECK_EQ(recorder.entries_per_rank(), FlightRecorder::kEntries);
  auto site = Sum(1);
  constexpr int kExtra = 100, kCount = FlightRecorder::kEntries + kExtra;
  std::vector<FlightRecorder::Ticket> tickets;
  for (int i = 0; i < kCount; ++i)
    tickets.push_back(recorder.Start(site->operation(), i, 1, 0, 0));
  // Overwritten: must not mark the entry that took its slot.
  recorder.Finish(tickets[kExtra - 1], State::kFailed);
  recorder.Finish(tickets[kExtra], State::kCompleted);
  const auto entries = recorder.Snapshot();
  CHECK_EQ(entries.size(), static_cast<size_t>(FlightRecorder::kEntries));
  for (size_t i = 0; i < entries.size(); ++i) {
    CHECK_EQ(entries[i].sequence, kExtra + i + 1);
    CHECK_EQ(entries[i].run_id, static_cast<int64_t>(kExtra + i));
    CHECK_TRUE(entries[i].state == (i == 0 ? State::kCompleted : State::kStarted));
  }
}

TEST(ranks_share_the_entries_out_and_a_busy_one_leaves_the_others_alone) {
  FlightRecorder four({{0, 1}, {2, 3}});
  CHECK_EQ(four.entries_per_rank(), 256);
  FlightRecorder three({{0, 1, 2}});
  CHECK_EQ(three.entries_per_rank(), 256);
  FlightRecorder recorder(ManyRanks());
  CHECK_EQ(recorder.entries_per_rank(), FlightRecorder::kLeastEntries);
  auto site = Sum(1);
  recorder.Start(site->operation(), 77, 1, 0, 5);
  for (int i = 0; i < 3000; ++i) recorder.Start(site->operation(), 1, 1, 0, 6);
  const auto entries = recorder.Snapshot();
  CHECK_EQ(entries[0].rank, 5);
  CHECK_EQ(entries[0].run_id, 77);
}

TEST(a_record_outlives_its_call_site_and_equal_sites_share_a_description) {
  FlightRecorder recorder(OneRank());
  uint32_t first;
  {
    auto site = Sum(6);
    first = site->operation();
    recorder.Start(site->operation(), 0, 1, 0, 0);
  }
  CHECK_EQ(recorder.Snapshot()[0].operation->operands, "float32[6]");
  CHECK_EQ(Sum(6)->operation(), first);
  // The second time it adds nothing.
  const uint32_t next = Sum(600)->operation();
  CHECK_EQ(Sum(6)->operation(), first);
  CHECK_EQ(Sum(601)->operation(), next + 1);
  // Another permutation is another operation, though it reads the same.
  auto there = MakeSite("permute", {-1, 0}, {FloatLeaf(3)}, {FloatLeaf(3)});
  auto back = MakeSite("permute", {1, -1}, {FloatLeaf(3)}, {FloatLeaf(3)});
  CHECK_TRUE(there->operation() != back->operation());
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

// Reported, not asserted: a benchmark checks speed.
TEST(the_cost_of_an_entry) {
  constexpr int kRounds = 1 << 20;
  auto site = Sum(1);
  for (const int threads_used : {1, 2, 4}) {
    for (const bool shared : {false, true}) {
      if (threads_used == 1 && shared) continue;
      FlightRecorder recorder({std::vector<int64_t>(threads_used)});
      const auto begin = std::chrono::steady_clock::now();
      std::vector<std::thread> threads;
      for (int t = 0; t < threads_used; ++t) {
        threads.emplace_back([&, t] {
          for (int i = 0; i < kRounds / threads_used; ++i) {
            recorder.Finish(recorder.Start(site->operation(), i, 1, 0, shared ? 0 : t),
                            State::kCompleted);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      const auto took = std::chrono::steady_clock::now() - begin;
      std::printf("  %d threads%s: %.1f ns of wall time for Start and Finish\n",
                  threads_used, shared ? " as one rank" : "",
                  std::chrono::duration<double, std::nano>(took).count() / kRounds);
    }
  }
}

}  // namespace
}  // namespace jaxcomm::testing
