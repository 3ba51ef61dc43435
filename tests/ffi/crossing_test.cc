// Tests groups that span processes: calls in different orders, and costs. Results of
// all sizes on all layouts: tests/processes.
#include <algorithm>
#include <deque>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

#include "tests/ffi/processes.h"

namespace jaxcomm::testing {
namespace {

// Calls of three ranks: more than there are channels, large and small, in another order
// on each rank.
void MeetInAnyOrder(std::vector<int> process_of) {
  constexpr int kCalls = 40;
  struct Kind {
    const char* collective;
    std::vector<int64_t> params;
    float expected[3];  // of each rank
  };
  const Kind kinds[] = {{"all_reduce", {}, {6, 6, 6}},
                        {"scan", {0, 0}, {1, 3, 6}},
                        {"broadcast", {2}, {3, 3, 3}}};
  Processes processes(std::move(process_of));
  std::deque<Calls> calls;
  for (int i = 0; i < kCalls; ++i) {
    const Kind& kind = kinds[i % 3];
    calls.emplace_back(processes, kind.collective, kind.params, i % 2 ? 100 : 60000 + i,
                       5, /*tag=*/1000 + i);
    for (int r = 0; r < 3; ++r) {
      auto& operand = calls[i].buffers[r].operand;
      operand.assign(operand.size(), static_cast<float>((r + 1) * (i + 1)));
    }
  }
  std::atomic<int> wrong{0};
  ForRanks(3, [&](int r) {
    std::vector<int> order(kCalls);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(r));
    for (int i : order) calls[i].Begin(r);
    for (int i = 0; i < kCalls; ++i) {
      wrong += !calls[i].End(r).empty();
      for (float x : calls[i].buffers[r].result) {
        wrong += x != kinds[i % 3].expected[r] * static_cast<float>(i + 1);
      }
    }
  });
  CHECK_EQ(wrong.load(), 0);
}

TEST(independent_calls_meet_in_any_order) {
  MeetInAnyOrder({0, 1, 2});
  MeetInAnyOrder({0, 1, 0});
}

TEST(a_process_that_is_ahead_meets_the_others_in_order) {
  // Rank 0 receives nothing and so waits for nobody: it opens many crossings of one
  // key, of which some are over before the next one opens.
  Processes processes(Blocks(2, 1));
  for (int64_t n : {1, 20000}) {
    Site site("permute", {-1, 0}, n, 2);
    std::atomic<int> wrong{0};
    ForRanks(2, [&](int r) {
      for (int round = 0; round < 300; ++round) {
        RankBuffers buffers(n, n, static_cast<float>(round));
        Outcome outcome;
        buffers.Arrive(processes.of(r), site.of[r].get(), 1, 100 + r, &outcome);
        wrong += !outcome.Wait().empty();
        wrong += buffers.result[n - 1] != static_cast<float>(r == 1 ? round : 0);
        if (r == 1 && round % 7 == 0) std::this_thread::yield();
      }
    });
    CHECK_EQ(wrong.load(), 0);
  }
}

// Two runs of one program under way at a time: whoever comes to a call of the second
// run first does not meet the first one there.
TEST(runs_that_overlap_meet_their_own_whoever_is_first) {
  Processes processes(Blocks(2, 1));
  std::deque<Calls> calls;
  for (const uint64_t tag : {1, 2}) {
    for (const int run : {1, 2}) {
      calls.emplace_back(processes, "all_reduce", std::vector<int64_t>{}, 4, run, tag);
      for (RankBuffers& rank : calls.back().buffers) {
        rank.operand.assign(4, static_cast<float>(run));
      }
    }
  }
  // By place in `calls`: a process numbers runs as they come.
  for (const int call : {0, 1, 2, 3}) calls[call].Begin(0);
  for (const int call : {2, 3, 1, 0}) calls[call].Begin(1);
  for (Calls& each : calls) {
    each.EndAll();
    for (const RankBuffers& rank : each.buffers) {
      CHECK_EQ(rank.result[3], 2.0f * static_cast<float>(each.run));
    }
  }
}

// Of a thread of this process by its name, in nanoseconds.
int64_t ProcessorTimeOf(const std::string& name) {
  int64_t time = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string found;
    std::getline(std::ifstream(task.path() / "comm"), found);
    int64_t its = 0;
    std::ifstream(task.path() / "schedstat") >> its;
    if (found == name) time += its;
  }
  return time;
}

TEST(waiting_for_another_process_takes_no_processor_time) {
  Processes processes(Blocks(2, 1));
  Calls sum(processes, "all_reduce", {}, 4, 1);
  sum.Begin(0);
  LetOthersRun();
  const int64_t before = ProcessorTimeOf("jaxcomm-arena");
  for (int i = 0; i < 10; ++i) LetOthersRun();
  CHECK_TRUE(ProcessorTimeOf("jaxcomm-arena") - before < 20'000'000);
  sum.Begin(1);
  sum.EndAll();
}

TEST(an_arena_costs_what_was_touched) {
  Processes processes(Blocks(2, 1));
  CHECK_TRUE(processes.segment->resident_bytes() < (1 << 20));
  // Two channels of two processes, if one starts a round before the other is done.
  constexpr int64_t kAtMost = 2 * 2 * kSlots * kSlotBytes + (1 << 20);
  for (int round = 0; round < 3; ++round) {
    Calls sum(processes, "all_reduce", {}, 4 << 20, round);
    sum.BeginAll();
    sum.EndAll();
  }
  CHECK_TRUE(processes.segment->resident_bytes() < kAtMost);
}

}  // namespace
}  // namespace jaxcomm::testing
