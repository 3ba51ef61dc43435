// Tests groups that span processes: results, calls in different orders, and costs.
#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/ffi/check.h"
#include "tests/ffi/processes.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

struct Case {
  std::string collective;
  std::vector<int64_t> params;
  int64_t operand, result;  // elements
};

// `n` elements a rank, times the number of ranks where a collective cuts.
std::vector<Case> Cases(int size, int64_t n) {
  std::vector<int64_t> ring(size), none(size, -1);
  for (int r = 0; r < size; ++r) ring[r] = (r + size - 1) % size;
  none[size - 1] = 0;
  return {
      {"all_reduce", {}, n, n},     {"permute", ring, n, n},
      {"permute", none, n, n},      {"scan", {0, 0}, n, n},
      {"scan", {1, 0}, n, n},       {"scan", {0, 1}, n, n},
      {"reduce", {size - 1}, n, n}, {"broadcast", {size - 1}, n, n},
      {"barrier", {}, n, n},
  };
}

float Value(int rank, int64_t i) {
  return static_cast<float>((rank + 1) * (i % 97 + 1));
}

std::vector<std::vector<float>> Run(Processes& processes, const Case& the, int rounds) {
  const int size = processes.size();
  Site site(the.collective, the.params, {FloatLeaf(the.operand)},
            {FloatLeaf(the.result)}, processes.count);
  std::vector<std::vector<float>> results(size);
  std::atomic<int> errors{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      RankBuffers buffers(the.operand, the.result, 0);
      for (int64_t i = 0; i < the.operand; ++i) buffers.operand[i] = Value(r, i);
      for (int round = 0; round < rounds; ++round) {
        std::fill(buffers.result.begin(), buffers.result.end(), -1.0f);
        Outcome outcome;
        buffers.Arrive(processes.of(r), site.of[processes.process_of[r]].get(), round,
                       100 + r, nullptr, &outcome);
        if (const std::string error = outcome.Wait(); !error.empty()) {
          std::fprintf(stderr, "%s\n", error.c_str());
          ++errors;
        }
      }
      results[r] = buffers.result;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(errors.load(), 0);
  return results;
}

TEST(every_layout_gives_what_one_process_gives) {
  const std::vector<std::vector<int>> layouts = {
      Blocks(2, 1), Blocks(3, 1), Blocks(2, 2), Blocks(4, 2), {0, 1, 0, 1}, {1, 0, 0}};
  for (const std::vector<int>& layout : layouts) {
    Processes several(layout);
    Processes one(std::vector<int>(layout.size(), 0));
    for (int64_t n : {0, 1, 7, 1000, 1025, 9000, 40000, 700001}) {
      for (const Case& the : Cases(static_cast<int>(layout.size()), n)) {
        const int before = Failures();
        const auto found = Run(several, the, 2), expected = Run(one, the, 1);
        CHECK_TRUE(found == expected);
        if (Failures() != before) {
          std::fprintf(stderr, "  in %s of %ld elements on %zu ranks of %d processes\n",
                       the.collective.c_str(), static_cast<long>(n), layout.size(),
                       several.count);
        }
      }
    }
  }
}

TEST(independent_calls_meet_in_any_order) {
  // More than there are channels, large and small, in another order on each process.
  constexpr int kCalls = 40;
  Processes processes(Blocks(3, 1));
  std::vector<std::unique_ptr<Site>> sites;
  for (int i = 0; i < kCalls; ++i) {
    const int64_t n = i % 2 ? 100 : 60000 + i;
    sites.push_back(std::make_unique<Site>("all_reduce", std::vector<int64_t>{},
                                           std::vector<Leaf>{FloatLeaf(n)},
                                           std::vector<Leaf>{FloatLeaf(n)}, 3));
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      std::vector<int> order(kCalls);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), std::mt19937(r));
      std::deque<Outcome> outcomes(kCalls);
      std::deque<RankBuffers> buffers;
      for (int i = 0; i < kCalls; ++i) {
        const int64_t n = sites[i]->of[r]->operands()[0].elements;
        buffers.emplace_back(n, n, static_cast<float>((r + 1) * (i + 1)));
      }
      for (int i : order) {
        buffers[i].Arrive(processes.of(r), sites[i]->of[r].get(), 5, 100 + r, nullptr,
                          &outcomes[i], /*tag=*/1000 + i);
      }
      for (int i = 0; i < kCalls; ++i) {
        if (!outcomes[i].Wait().empty()) ++wrong;
        for (float x : buffers[i].result)
          wrong += x != 6.0f * static_cast<float>(i + 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(a_process_that_is_ahead_meets_the_others_in_order) {
  // Rank 0 receives nothing and so waits for nobody: it opens many crossings of one
  // key, of which some are over before the next one opens.
  constexpr int kRounds = 300;
  Processes processes(Blocks(2, 1));
  for (int64_t n : {1, 20000}) {
    Site site("permute", {-1, 0}, {FloatLeaf(n)}, {FloatLeaf(n)}, 2);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        for (int round = 0; round < kRounds; ++round) {
          RankBuffers buffers(n, n, static_cast<float>(round));
          Outcome outcome;
          buffers.Arrive(processes.of(r), site.of[r].get(), 1, 100 + r, nullptr,
                         &outcome);
          if (!outcome.Wait().empty()) ++wrong;
          wrong += buffers.result[n - 1] != static_cast<float>(r == 1 ? round : 0);
          if (r == 1 && round % 7 == 0) std::this_thread::yield();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
  }
}

TEST(an_arena_costs_what_was_touched) {
  Processes processes(Blocks(2, 1));
  CHECK_TRUE(processes.segment->resident_bytes() < (1 << 20));
  Run(processes, {"all_reduce", {}, 1 << 20, 1 << 20}, 3);
  const int64_t after = processes.segment->resident_bytes();
  // Two channels of two processes, if one starts a round before the other is done.
  constexpr int64_t kAtMost = 2 * 2 * kSlots * kSlotBytes + (1 << 20);
  CHECK_TRUE(after < kAtMost);
  Run(processes, {"all_reduce", {}, 4 << 20, 4 << 20}, 3);
  CHECK_TRUE(processes.segment->resident_bytes() < kAtMost);
}

}  // namespace
}  // namespace jaxcomm::testing
