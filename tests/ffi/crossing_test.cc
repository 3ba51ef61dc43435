// Tests groups that span processes: results, calls in different orders, and costs.
#include <algorithm>
#include <deque>
#include <numeric>
#include <random>

#include "tests/ffi/processes.h"

namespace jaxcomm::testing {
namespace {

struct Case {
  std::string collective;
  std::vector<int64_t> params;
};

std::vector<Case> Cases(int size) {
  std::vector<int64_t> ring(size), none(size, -1);
  for (int r = 0; r < size; ++r) ring[r] = (r + size - 1) % size;
  none[size - 1] = 0;
  return {{"all_reduce", {}},       {"permute", ring}, {"permute", none},
          {"scan", {1, 0}},         {"scan", {0, 1}},  {"reduce", {size - 1}},
          {"broadcast", {size - 1}}};
}

std::vector<std::vector<float>> Run(Processes& processes, const Case& the, int64_t n,
                                    int rounds) {
  Site site(the.collective, the.params, n, processes.count);
  std::vector<std::vector<float>> results(processes.size());
  std::atomic<int> errors{0};
  ForRanks(processes.size(), [&](int r) {
    RankBuffers buffers(n, n, 0);
    for (int64_t i = 0; i < n; ++i) {
      buffers.operand[i] = static_cast<float>((r + 1) * (i % 97 + 1));
    }
    for (int round = 0; round < rounds; ++round) {
      std::fill(buffers.result.begin(), buffers.result.end(), -1.0f);
      Outcome outcome;
      buffers.Arrive(processes.of(r), site.of[processes.process_of[r]].get(), round,
                     100 + r, nullptr, &outcome);
      errors += !outcome.Wait().empty();
    }
    results[r] = buffers.result;
  });
  CHECK_EQ(errors.load(), 0);
  return results;
}

// Every collective that moves or adds on every layout: small ones, and those of one
// chunk, several, and more than there are slots.
TEST(every_layout_gives_what_one_process_gives) {
  const std::vector<std::vector<int>> layouts = {
      Blocks(2, 1), Blocks(3, 1), Blocks(4, 2), {0, 1, 0, 1}, {1, 0, 0}};
  for (const std::vector<int>& layout : layouts) {
    Processes several(layout);
    Processes one(std::vector<int>(layout.size(), 0));
    for (int64_t n : {0, 1, 1000, 1025, 40000, 300001}) {
      for (const Case& the : Cases(static_cast<int>(layout.size()))) {
        const int before = Failures();
        CHECK_TRUE(Run(several, the, n, 2) == Run(one, the, n, 1));
        if (Failures() == before) continue;
        std::fprintf(stderr, "  in %s of %ld elements on %zu ranks of %d processes\n",
                     the.collective.c_str(), static_cast<long>(n), layout.size(),
                     several.count);
      }
    }
  }
}

TEST(independent_calls_meet_in_any_order) {
  // More than there are channels, large and small, in another order on each process.
  constexpr int kCalls = 40;
  Processes processes(Blocks(3, 1));
  std::deque<Calls> calls;
  for (int i = 0; i < kCalls; ++i) {
    calls.emplace_back(processes, "all_reduce", std::vector<int64_t>{},
                       i % 2 ? 100 : 60000 + i, 5, /*tag=*/1000 + i);
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
        wrong += x != 6.0f * static_cast<float>(i + 1);
      }
    }
  });
  CHECK_EQ(wrong.load(), 0);
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
        buffers.Arrive(processes.of(r), site.of[r].get(), 1, 100 + r, nullptr,
                       &outcome);
        wrong += !outcome.Wait().empty();
        wrong += buffers.result[n - 1] != static_cast<float>(r == 1 ? round : 0);
        if (r == 1 && round % 7 == 0) std::this_thread::yield();
      }
    });
    CHECK_EQ(wrong.load(), 0);
  }
}

TEST(an_arena_costs_what_was_touched) {
  Processes processes(Blocks(2, 1));
  CHECK_TRUE(processes.segment->resident_bytes() < (1 << 20));
  // Two channels of two processes, if one starts a round before the other is done.
  constexpr int64_t kAtMost = 2 * 2 * kSlots * kSlotBytes + (1 << 20);
  for (int64_t elements : {1 << 20, 4 << 20}) {
    Run(processes, {"all_reduce", {}}, elements, 3);
    CHECK_TRUE(processes.segment->resident_bytes() < kAtMost);
  }
}

}  // namespace
}  // namespace jaxcomm::testing
