#include "ffi/backends/host/local_communicator.h"

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/backends/host/continuer.h"
#include "ffi/backends/host/local_wait.h"
#include "ffi/os/cores.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

std::vector<std::vector<int64_t>> OneGroup(int size) {
  std::vector<int64_t> devices;
  for (int i = 0; i < size; ++i) devices.push_back(100 + i);
  return {devices};
}

// No thread watches its deadlines: they pass when a test says so, however slow it is.
struct Unwatched {
  Unwatched(int size, double timeout_seconds)
      : timeout(timeout_seconds),
        communicator(std::make_shared<LocalCommunicator>(
            Spec(OneGroup(size), timeout_seconds))) {
    CHECK_TRUE(StartContinuing().success());
  }
  LocalCommunicator* operator->() { return communicator.get(); }
  LocalCommunicator& operator*() { return *communicator; }
  // Ends the time of all that has begun.
  void Expire() {
    std::this_thread::sleep_for(timeout);
    communicator->Poll();
  }

  const std::chrono::duration<double> timeout;
  const std::shared_ptr<LocalCommunicator> communicator;
};

TEST(the_last_rank_to_arrive_completes_an_all_reduce) {
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(3)));
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(5)}, {FloatLeaf(5)});
  std::vector<RankBuffers> ranks;
  for (int r = 0; r < 3; ++r) ranks.emplace_back(5, 5, static_cast<float>(r + 1));
  std::deque<Outcome> outcomes(3);
  for (int r = 0; r < 3; ++r) {
    CHECK_TRUE(r == 0 || !outcomes[0].done());
    ranks[r].Arrive(*communicator, site.get(), 7, 100 + r, nullptr, &outcomes[r]);
  }
  for (int r = 0; r < 3; ++r) {
    CHECK_EQ(outcomes[r].Wait(), "");
    for (float value : ranks[r].result) CHECK_EQ(value, 6.0f);
  }
  CHECK_EQ(communicator->stats().in_flight, 0);
}

TEST(threads_as_ranks_agree_over_many_rounds_and_sizes) {
  constexpr int kRanks = 4, kRounds = 200;
  for (int64_t elements : {0, 1, 7, 1000, 300000}) {
    auto communicator = MakeLocalCommunicator(Spec(OneGroup(kRanks)));
    auto site =
        MakeSite("all_reduce", {}, {FloatLeaf(elements)}, {FloatLeaf(elements)});
    const int rounds = elements > 1000 ? 10 : kRounds;
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int r = 0; r < kRanks; ++r) {
      threads.emplace_back([&, r] {
        ThreadScheduler scheduler(2);
        RankBuffers buffers(elements, elements, 0);
        for (int round = 0; round < rounds; ++round) {
          for (float& x : buffers.operand) x = static_cast<float>(r + round);
          Outcome outcome;
          buffers.Arrive(*communicator, site.get(), round, 100 + r, &scheduler,
                         &outcome);
          if (!outcome.Wait().empty()) ++wrong;
          const float expected = 6.0f + 4.0f * static_cast<float>(round);
          for (float x : buffers.result) wrong += x != expected;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
  }
}

TEST(a_permutation_completes_pair_by_pair) {
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(4)));
  // 0 -> 1 and 2 -> 3 only.
  auto site = MakeSite("permute", {-1, 0, -1, 2}, {FloatLeaf(3)}, {FloatLeaf(3)});
  std::vector<RankBuffers> ranks;
  for (int r = 0; r < 4; ++r) ranks.emplace_back(3, 3, static_cast<float>(r));
  std::deque<Outcome> outcomes(4);
  ranks[1].Arrive(*communicator, site.get(), 1, 101, nullptr, &outcomes[1]);
  CHECK_TRUE(!outcomes[1].done());
  ranks[0].Arrive(*communicator, site.get(), 1, 100, nullptr, &outcomes[0]);
  CHECK_EQ(outcomes[0].Wait(), "");
  CHECK_EQ(outcomes[1].Wait(), "");
  CHECK_EQ(ranks[1].result[2], 0.0f);
  CHECK_EQ(ranks[0].result[0], 0.0f);
  ranks[2].Arrive(*communicator, site.get(), 1, 102, nullptr, &outcomes[2]);
  ranks[3].Arrive(*communicator, site.get(), 1, 103, nullptr, &outcomes[3]);
  for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
  CHECK_EQ(ranks[3].result[0], 2.0f);
  CHECK_EQ(communicator->stats().in_flight, 0);
}

TEST(a_fast_pair_may_be_an_execution_ahead) {
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(4)));
  auto site = MakeSite("permute", {1, 0, 3, 2}, {FloatLeaf(1)}, {FloatLeaf(1)});
  std::deque<Outcome> outcomes;
  std::deque<RankBuffers> ranks;
  const auto arrive = [&](int rank, float value) {
    ranks.emplace_back(1, 1, value);
    outcomes.emplace_back();
    ranks.back().Arrive(*communicator, site.get(), 1, 100 + rank, nullptr,
                        &outcomes.back());
    return ranks.size() - 1;
  };
  arrive(0, 1), arrive(1, 2);
  const auto second = arrive(0, 3);
  arrive(1, 4);
  for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
  CHECK_EQ(ranks[second].result[0], 4.0f);
  const auto late = arrive(2, 5);
  arrive(3, 6);
  const auto late_second = arrive(2, 7);
  arrive(3, 8);
  for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
  CHECK_EQ(ranks[late].result[0], 6.0f);
  CHECK_EQ(ranks[late_second].result[0], 8.0f);
  CHECK_EQ(communicator->stats().in_flight, 0);
}

TEST(a_rank_that_never_arrives_is_named_to_those_who_wait) {
  Unwatched communicator(4, 0.05);
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(2)}, {FloatLeaf(2)});
  RankBuffers first(2, 2, 1), third(2, 2, 1), late(2, 2, 1);
  Outcome first_outcome, third_outcome, late_outcome;
  first.Arrive(*communicator, site.get(), 3, 100, nullptr, &first_outcome);
  third.Arrive(*communicator, site.get(), 3, 102, nullptr, &third_outcome);
  communicator.Expire();
  CHECK_EQ(first_outcome.Wait(),
           "all_reduce(float32[2]) over axes ('x',): rank 0 of 4 (cpu:100) waited "
           "0.05 s for ranks 1, 3. They may have stopped or run a different program; "
           "see JAXCOMM_TIMEOUT.");
  CHECK_TRUE(third_outcome.Wait().find("rank 2 of 4 (cpu:102)") != std::string::npos);
  // A rank that comes later fails at once: no rank waits for it any more.
  late.Arrive(*communicator, site.get(), 3, 101, nullptr, &late_outcome);
  CHECK_TRUE(late_outcome.Wait().find("stopped waiting") != std::string::npos);
  // The next run is not disturbed.
  std::deque<Outcome> outcomes(4);
  std::deque<RankBuffers> ranks;
  for (int r = 0; r < 4; ++r) {
    ranks.emplace_back(2, 2, 1.0f);
    ranks[r].Arrive(*communicator, site.get(), 4, 100 + r, nullptr, &outcomes[r]);
  }
  for (int r = 0; r < 4; ++r) CHECK_EQ(outcomes[r].Wait(), "");
  CHECK_EQ(ranks[3].result[0], 4.0f);
}

TEST(a_pairwise_call_may_outlive_its_program) {
  // Rank 0 neither sends nor receives. The other ranks' programs failed before they
  // came to the call, and all programs are deleted before the timeout.
  Unwatched communicator(3, 0.05);
  auto site = MakeSite("permute", {-1, 2, 1}, {FloatLeaf(2)}, {FloatLeaf(2)});
  RankBuffers zero(2, 2, 1);
  Outcome outcome;
  zero.Arrive(*communicator, site.get(), 1, 100, nullptr, &outcome);
  CHECK_EQ(outcome.Wait(), "");
  CHECK_EQ(communicator->stats().in_flight, 1);
  site.reset();
  communicator.Expire();
  CHECK_EQ(communicator->stats().in_flight, 0);
  // No rank waited, so no run has failed.
  CHECK_TRUE(communicator->FailedRuns().empty());
}

TEST(ranks_that_come_after_a_pairwise_call_was_forgotten_meet_each_other) {
  Unwatched communicator(4, 0.05);
  auto site = MakeSite("permute", {1, 0, 3, 2}, {FloatLeaf(2)}, {FloatLeaf(2)});
  std::deque<RankBuffers> ranks;
  std::deque<Outcome> outcomes(4);
  for (int r = 0; r < 4; ++r) ranks.emplace_back(2, 2, static_cast<float>(r));
  const auto arrive = [&](int r) {
    ranks[r].Arrive(*communicator, site.get(), 1, 100 + r, nullptr, &outcomes[r]);
  };
  arrive(0), arrive(1);
  for (int r : {0, 1}) CHECK_EQ(outcomes[r].Wait(), "");
  CHECK_EQ(communicator->stats().in_flight, 1);
  communicator.Expire();
  CHECK_EQ(communicator->stats().in_flight, 0);
  arrive(2), arrive(3);
  for (int r : {2, 3}) CHECK_EQ(outcomes[r].Wait(), "");
  CHECK_EQ(ranks[2].result[1], 3.0f);
  CHECK_EQ(ranks[3].result[1], 2.0f);
}

TEST(the_time_of_a_pair_begins_when_it_comes) {
  Unwatched communicator(4, 0.2);
  auto site = MakeSite("permute", {1, 0, 3, 2}, {FloatLeaf(2)}, {FloatLeaf(2)});
  std::deque<RankBuffers> ranks(4, {2, 2, 1.0f});
  std::deque<Outcome> outcomes(4);
  const auto arrive = [&](int r) {
    ranks[r].Arrive(*communicator, site.get(), 1, 100 + r, nullptr, &outcomes[r]);
  };
  arrive(0), arrive(1);
  for (int r : {0, 1}) CHECK_EQ(outcomes[r].Wait(), "");
  // The round is as old as one may be when rank 2 comes.
  std::this_thread::sleep_for(communicator.timeout);
  const auto begin = std::chrono::steady_clock::now();
  arrive(2);
  CHECK_TRUE(Comes([&] {
    communicator->Poll();
    return outcomes[2].done();
  }));
  CHECK_TRUE(std::chrono::steady_clock::now() - begin >= communicator.timeout);
  CHECK_CONTAINS(outcomes[2].Wait(), "waited 0.2 s for rank 3");
}

TEST(a_timeout_says_where_the_missing_rank_waits_instead) {
  Unwatched communicator(2, 0.05);
  auto sum = MakeSite("all_reduce", {}, {FloatLeaf(2)}, {FloatLeaf(2)});
  auto gather = MakeSite("all_gather", {1}, {FloatLeaf(2)}, {FloatLeaf(4)});
  RankBuffers zero(2, 2, 1), one(2, 4, 1);
  Outcome zero_outcome, one_outcome;
  zero.Arrive(*communicator, sum.get(), 3, 100, nullptr, &zero_outcome);
  one.Arrive(*communicator, gather.get(), 3, 101, nullptr, &one_outcome, /*tag=*/2);
  communicator.Expire();
  CHECK_TRUE(
      zero_outcome.Wait().find("Rank 1 waits in all_gather(float32[2]) instead.") !=
      std::string::npos);
  CHECK_TRUE(
      one_outcome.Wait().find("Rank 0 waits in all_reduce(float32[2]) instead.") !=
      std::string::npos);
}

TEST(closing_fails_whoever_waits_and_whoever_comes) {
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(2)));
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(1)}, {FloatLeaf(1)});
  RankBuffers zero(1, 1, 1), one(1, 1, 1);
  Outcome zero_outcome, one_outcome;
  zero.Arrive(*communicator, site.get(), 1, 100, nullptr, &zero_outcome);
  communicator->Abort(FailedPrecondition("closed"));
  CHECK_EQ(zero_outcome.Wait(), "closed");
  one.Arrive(*communicator, site.get(), 1, 101, nullptr, &one_outcome);
  CHECK_EQ(one_outcome.Wait(), "closed");
}

TEST(closing_while_bytes_move_fails_the_rest_when_they_have) {
  constexpr int64_t kElements = 16 << 20;  // takes milliseconds
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(4)));
  auto site =
      MakeSite("permute", {1, 2, 3, 0}, {FloatLeaf(kElements)}, {FloatLeaf(kElements)});
  std::deque<RankBuffers> buffers(2, {kElements, kElements, 1.0f});
  std::deque<Outcome> outcomes(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      buffers[r].Arrive(*communicator, site.get(), 7, 100 + r, nullptr, &outcomes[r]);
    });
  }
  while (communicator->stats().bytes < 2 * 4 * kElements) std::this_thread::yield();
  communicator->Abort(FailedPrecondition("closed by a test"));
  // The others of this run must not find the communicator that comes after it.
  CHECK_TRUE(communicator->FailedRuns() == std::vector<int64_t>{7});
  for (std::thread& thread : threads) thread.join();
  for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "closed by a test");
  CHECK_EQ(communicator->stats().in_flight, 0);
}

TEST(a_device_of_another_mesh_is_refused) {
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(2)));
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(1)}, {FloatLeaf(1)});
  RankBuffers stranger(1, 1, 1);
  Outcome outcome;
  stranger.Arrive(*communicator, site.get(), 1, 5, nullptr, &outcome);
  CHECK_TRUE(outcome.Wait().find("device cpu:5 is not part of this communicator") !=
             std::string::npos);
}

TEST(groups_do_not_wait_for_each_other) {
  auto communicator = MakeLocalCommunicator(Spec({{1, 2}, {3, 4, 5}}));
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(1)}, {FloatLeaf(1)});
  std::deque<RankBuffers> ranks;
  std::deque<Outcome> outcomes(5);
  for (int i = 0; i < 5; ++i) ranks.emplace_back(1, 1, static_cast<float>(i));
  ranks[2].Arrive(*communicator, site.get(), 1, 3, nullptr, &outcomes[2]);
  ranks[0].Arrive(*communicator, site.get(), 1, 1, nullptr, &outcomes[0]);
  ranks[1].Arrive(*communicator, site.get(), 1, 2, nullptr, &outcomes[1]);
  CHECK_EQ(outcomes[0].Wait(), "");
  CHECK_EQ(ranks[0].result[0], 1.0f);
  CHECK_TRUE(!outcomes[2].done());
  ranks[3].Arrive(*communicator, site.get(), 1, 4, nullptr, &outcomes[3]);
  ranks[4].Arrive(*communicator, site.get(), 1, 5, nullptr, &outcomes[4]);
  for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
  CHECK_EQ(ranks[4].result[0], 9.0f);
}

TEST(a_rank_whose_program_blocks_holds_nobody_else_up) {
  // Each rank's program, once let go on, waits for all the others, as a collective
  // of XLA:CPU does.
  constexpr int kRanks = 6;
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(kRanks)));
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(1)}, {FloatLeaf(1)});
  std::deque<RankBuffers> ranks;
  std::atomic<int> gone_on{0};
  std::atomic<int> released{0};
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back(1, 1, 1.0f);
    const void* operands[] = {ranks[r].operand.data()};
    void* results[] = {ranks[r].result.data()};
    communicator
        ->Execute(Call{site.get(), 1, 1, 1, 100 + r, operands, results, nullptr})
        .OnReady([&](const std::optional<xla::ffi::Error>&) {
          ++gone_on;
          while (gone_on.load() < kRanks) std::this_thread::yield();
          ++released;
        });
  }
  while (released.load() < kRanks) std::this_thread::yield();
  CHECK_EQ(released.load(), kRanks);
}

TEST(a_rank_spins_where_the_missing_ones_have_cores) {
  const int cores = Cores();
  const auto spins = [](const char* collective, int64_t elements, int ranks, int come) {
    std::vector<int64_t> params;
    if (collective == std::string("permute")) {
      for (int rank = 0; rank < ranks; ++rank) params.push_back((rank + 1) % ranks);
    }
    auto site =
        MakeSite(collective, params, {FloatLeaf(elements)}, {FloatLeaf(elements)});
    LocalRound round(static_cast<size_t>(ranks));
    round.Reset(site.get(), 1);
    round.come = come;
    round.own_plan = Must(MakeHostPlan(*site, ranks, /*operands_of=*/nullptr));
    round.plan = &round.own_plan;
    return ShouldSpin(round, ranks);
  };
  constexpr int64_t kSmall = 8, kLarge = 64 << 10;
  CHECK_TRUE(spins("all_reduce", kSmall, cores, 1));
  // Among more ranks than cores, only pairs help each other to move.
  CHECK_TRUE(!spins("all_reduce", kSmall, cores + 1, 2));
  CHECK_TRUE(!spins("all_reduce", kLarge, cores + 1, 2));
  CHECK_TRUE(!spins("permute", kSmall, cores + 1, 2));
  CHECK_TRUE(spins("permute", kLarge, cores + 1, 2));
  CHECK_TRUE(!spins("permute", kLarge, cores + 1, 1));
}

TEST(deadlines_and_arrivals_race_without_losing_anyone) {
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(2), 0.01));
  auto site = MakeSite("permute", {1, 0}, {FloatLeaf(64)}, {FloatLeaf(64)});
  std::vector<std::thread> threads;
  std::atomic<int> finished{0};
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      RankBuffers buffers(64, 64, 1.0f);
      for (int round = 0; round < 20; ++round) {
        // One rank's pace drifts against the deadline: some rounds meet, some fail.
        if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(round));
        Outcome outcome;
        buffers.Arrive(*communicator, site.get(), round, 100 + r, nullptr, &outcome);
        outcome.Wait();
        ++finished;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(finished.load(), 40);
  CHECK_EQ(communicator->stats().in_flight, 0);
}

TEST(steady_state_keeps_the_memory_it_has) {
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(2)));
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(8)}, {FloatLeaf(8)});
  RankBuffers zero(8, 8, 1), one(8, 8, 2);
  int64_t after_ten = 0;
  for (int run = 0; run < 2000; ++run) {
    Outcome first, second;
    zero.Arrive(*communicator, site.get(), run, 100, nullptr, &first);
    one.Arrive(*communicator, site.get(), run, 101, nullptr, &second);
    first.Wait(), second.Wait();
    if (run == 10) after_ten = communicator->stats().host_bytes;
  }
  CHECK_EQ(communicator->stats().host_bytes, after_ten);
  CHECK_EQ(communicator->stats().calls[0].second, 2000);
}

}  // namespace
}  // namespace jaxcomm::testing
