// Groups whose ranks are threads of one process.
#include "ffi/backends/host/local/local_communicator.h"

#include <deque>
#include <numeric>

#include "ffi/backends/host/local/continuer.h"
#include "ffi/backends/host/local/local_wait.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

std::vector<std::vector<int64_t>> OneGroup(int size) {
  std::vector<int64_t> devices(size);
  std::iota(devices.begin(), devices.end(), 100);
  return {devices};
}

// One call of each rank of a communicator, device 100 + rank. Rank r hands in r + 1.
struct Ranks {
  Ranks(Communicator& communicator, CallSite* site, int64_t run = 1)
      : communicator(communicator), site(site), run(run) {}
  ~Ranks() {
    for (const int rank : arrived) End(rank);
  }
  void Arrive(int rank) {
    arrived.push_back(rank);
    buffers[rank].Arrive(communicator, site, run, 100 + rank, &outcomes[rank]);
  }
  std::string End(int rank) { return outcomes[rank].Wait(); }
  // The last element of a rank's result, once that is there.
  float Result(int rank) {
    CHECK_EQ(End(rank), "");
    return buffers[rank].result.back();
  }

  Communicator& communicator;
  CallSite* const site;
  const int64_t run;
  const int64_t in = site->operands()[0].elements, out = site->results()[0].elements;
  std::deque<RankBuffers> buffers = {
      {in, out, 1}, {in, out, 2}, {in, out, 3}, {in, out, 4}, {in, out, 5}};
  std::deque<Outcome> outcomes = std::deque<Outcome>(5);
  std::vector<int> arrived;
};

// No thread watches its timeouts: they pass when a test says so, however slow it is.
struct Patient {
  explicit Patient(int size, double timeout_seconds = kAtOnce)
      : communicator(std::make_shared<LocalCommunicator>(
            Spec(OneGroup(size), timeout_seconds))) {
    CHECK_OK(StartContinuing());
  }
  LocalCommunicator* operator->() { return communicator.get(); }
  LocalCommunicator& operator*() { return *communicator; }
  // Ends the time of all that has begun.
  void Expire() {
    const Stopwatch begin;
    CHECK_TRUE(Until([&] { return begin.seconds() > 0; }));
    communicator->Poll();
  }

  const std::shared_ptr<LocalCommunicator> communicator;
};

TEST(ranks_that_are_an_execution_ahead_meet_the_others_in_order) {
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(4)));
  // Rank 0 receives nothing, so it waits for nobody.
  auto site = FloatSite("permute", {-1, 0, 3, 2}, 1);
  Ranks first(*communicator, site.get()), second(*communicator, site.get());
  second.buffers[0].operand[0] = 10;
  second.buffers[3].operand[0] = 40;
  for (int rank : {0, 1}) first.Arrive(rank), second.Arrive(rank);
  CHECK_EQ(first.Result(0), 0.0f);
  CHECK_EQ(first.Result(1), 1.0f);
  CHECK_EQ(second.Result(1), 10.0f);
  for (Ranks* call : {&first, &second}) call->Arrive(2), call->Arrive(3);
  CHECK_EQ(first.Result(2), 4.0f);
  CHECK_EQ(second.Result(2), 40.0f);
  CHECK_EQ(communicator->stats().in_flight, 0);
}

TEST(a_rank_that_never_arrives_is_named_to_those_who_wait) {
  Patient communicator(4);
  auto site = FloatSite("all_reduce", {}, 2);
  Ranks ranks(*communicator, site.get(), 3);
  ranks.Arrive(0), ranks.Arrive(2);
  communicator.Expire();
  CHECK_EQ(ranks.End(0),
           "all_reduce(float32[2]) over axes ('x',): rank 0 of 4 (cpu:100) waited "
           "0 s for ranks 1, 3. They may have stopped or run a different program; "
           "see JAXCOMM_TIMEOUT.");
  CHECK_CONTAINS(ranks.End(2), "rank 2 of 4 (cpu:102)");
  CHECK_TRUE(communicator->FailedRuns() == std::vector<int64_t>{3});
  // A rank that comes later fails at once, here and at any other place of the run: no
  // rank waits for it any more.
  for (int late : {1, 3}) {
    ranks.Arrive(late);
    CHECK_CONTAINS(ranks.End(late), "stopped waiting");
  }
  auto other = FloatSite("all_gather", {1}, 2, 8);
  Ranks gathers(*communicator, other.get(), 3);
  gathers.Arrive(0);
  CHECK_CONTAINS(gathers.End(0), "stopped waiting");
  // The next run is not disturbed.
  Ranks next(*communicator, site.get(), 4);
  for (int r = 0; r < 4; ++r) next.Arrive(r);
  CHECK_EQ(next.Result(3), 10.0f);
}

TEST(a_run_that_fails_in_one_group_ends_in_all) {
  // Nobody ends a wait by its timeout.
  LocalCommunicator communicator(Spec({{100, 101}, {102, 103}}));
  CHECK_OK(StartContinuing());
  auto sum = FloatSite("all_reduce", {}, 2), bad = FloatSite("permute", {0}, 2);
  Ranks sums(communicator, sum.get(), 5), refused(communicator, bad.get(), 5);
  sums.Arrive(2);
  refused.Arrive(0);
  CHECK_CONTAINS(refused.End(0), "a permutation of 1 ranks was given to a group of 2");
  for (int rank : {2, 3}) {
    if (rank == 3) sums.Arrive(rank);
    CHECK_CONTAINS(sums.End(rank),
                   "another collective of the program failed: permute(");
  }
  Ranks next(communicator, sum.get(), 6);
  for (int rank : {2, 3}) next.Arrive(rank);
  CHECK_EQ(next.Result(3), 7.0f);
}

TEST(what_still_waits_a_second_after_an_interrupt_fails) {
  Patient communicator(2, kHangSeconds);
  auto site = FloatSite("all_reduce", {}, 2);
  Ranks before(*communicator, site.get(), 1), after(*communicator, site.get(), 2);
  before.Arrive(0);
  communicator->Interrupt();
  after.Arrive(0);
  communicator.Expire();
  CHECK_TRUE(!before.outcomes[0].done());  // it may yet end by itself
  CHECK_TRUE(Until([&] {
    communicator->Poll();
    return before.outcomes[0].done();
  }));
  CHECK_EQ(before.End(0),
           "all_reduce(float32[2]) over axes ('x',): interrupted while a rank waited "
           "for others.");
  // What began later is not concerned.
  after.Arrive(1);
  CHECK_EQ(after.Result(0), 3.0f);
}

TEST(a_pairwise_call_may_outlive_its_program) {
  // Rank 0 neither sends nor receives. The other ranks' programs failed before they
  // came to the call, and all programs are deleted before the timeout.
  Patient communicator(3);
  auto site = FloatSite("permute", {-1, 2, 1}, 2);
  Ranks ranks(*communicator, site.get());
  ranks.Arrive(0);
  CHECK_EQ(ranks.End(0), "");
  CHECK_EQ(communicator->stats().in_flight, 1);
  site.reset();
  communicator.Expire();
  CHECK_EQ(communicator->stats().in_flight, 0);
  // No rank waited, so no run has failed.
  CHECK_TRUE(communicator->FailedRuns().empty());
}

TEST(ranks_that_come_after_a_pairwise_call_was_forgotten_meet_each_other) {
  Patient communicator(4);
  auto site = FloatSite("permute", {1, 0, 3, 2}, 2);
  Ranks ranks(*communicator, site.get());
  ranks.Arrive(0), ranks.Arrive(1);
  for (int r : {0, 1}) CHECK_EQ(ranks.End(r), "");
  CHECK_EQ(communicator->stats().in_flight, 1);
  communicator.Expire();
  CHECK_EQ(communicator->stats().in_flight, 0);
  ranks.Arrive(2), ranks.Arrive(3);
  CHECK_EQ(ranks.Result(2), 4.0f);
  CHECK_EQ(ranks.Result(3), 3.0f);
}

TEST_ALONE(the_time_of_a_pair_begins_when_it_comes, EXIT_SUCCESS) {
  Patient communicator(4, kExpires);
  auto site = FloatSite("permute", {1, 0, 3, 2}, 2);
  Ranks ranks(*communicator, site.get());
  ranks.Arrive(0), ranks.Arrive(1);
  for (int r : {0, 1}) CHECK_EQ(ranks.End(r), "");
  // The round is as old as one may be when rank 2 comes.
  const Stopwatch since_the_first;
  CHECK_TRUE(Until([&] { return since_the_first.seconds() > kExpires; }));
  const Stopwatch since_the_third;
  ranks.Arrive(2);
  CHECK_TRUE(Until([&] {
    communicator->Poll();
    return ranks.outcomes[2].done();
  }));
  CHECK_TRUE(since_the_third.seconds() >= kExpires);
  CHECK_CONTAINS(ranks.End(2), "waited 1 s for rank 3");
}

TEST(a_timeout_says_where_the_missing_rank_waits_instead) {
  Patient communicator(2);
  auto sum = FloatSite("all_reduce", {}, 2),
       gather = FloatSite("all_gather", {1}, 2, 4);
  Ranks sums(*communicator, sum.get(), 3), gathers(*communicator, gather.get(), 3);
  sums.Arrive(0);
  gathers.buffers[1].Arrive(*communicator, gather.get(), 3, 101, &gathers.outcomes[1],
                            /*tag=*/2);
  communicator.Expire();
  CHECK_CONTAINS(sums.End(0), "Rank 1 waits in all_gather(float32[2]) instead.");
  CHECK_CONTAINS(gathers.End(1), "Rank 0 waits in all_reduce(float32[2]) instead.");
}

TEST(closing_while_bytes_move_fails_the_rest_when_they_have) {
  constexpr int64_t kElements = 4 << 20;  // takes a millisecond
  auto communicator = MakeLocalCommunicator(Spec(OneGroup(4)));
  auto site = FloatSite("permute", {1, 2, 3, 0}, kElements);
  std::deque<RankBuffers> buffers(2, {kElements, kElements, 1.0f});
  std::deque<Outcome> outcomes(2);
  std::thread closer([&] {
    CHECK_TRUE(Until([&] { return communicator->stats().bytes >= 2 * 4 * kElements; }));
    communicator->Abort(FailedPrecondition("closed by a test"));
  });
  ForRanks(2, [&](int r) {
    buffers[r].Arrive(*communicator, site.get(), 7, 100 + r, &outcomes[r]);
  });
  closer.join();
  // The others of this run must not find the communicator that comes after it.
  CHECK_TRUE(communicator->FailedRuns() == std::vector<int64_t>{7});
  for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "closed by a test");
  CHECK_EQ(communicator->stats().in_flight, 0);
  auto next = FloatSite("all_reduce", {}, 1);
  Ranks later(*communicator, next.get());
  later.Arrive(0);
  CHECK_EQ(later.End(0), "closed by a test");
}

TEST(a_device_of_another_mesh_is_refused) {
  auto communicator = MakeLocalCommunicator(Spec({{5, 6}}));
  auto site = FloatSite("all_reduce", {}, 1);
  Ranks ranks(*communicator, site.get());
  ranks.Arrive(0);
  CHECK_CONTAINS(ranks.End(0), "device cpu:100 is not part of this communicator");
}

TEST(timeouts_and_arrivals_race_without_losing_anyone) {
  Patient communicator(2);
  auto site = FloatSite("permute", {1, 0}, 64);
  std::atomic<int> finished{0};
  std::atomic<bool> polls{true};
  // Some rounds meet, and some time out: whichever comes first.
  std::thread expires([&] {
    for (int turn = 0; polls; ++turn) {
      if (turn % 8 == 0) communicator->Poll();
      std::this_thread::yield();
    }
  });
  ForRanks(2, [&](int r) {
    RankBuffers buffers(64, 64, 1.0f);
    for (int round = 0; round < 200; ++round) {
      Outcome outcome;
      buffers.Arrive(*communicator, site.get(), round, 100 + r, &outcome);
      outcome.Wait();
      ++finished;
    }
  });
  polls = false;
  expires.join();
  CHECK_EQ(finished.load(), 400);
  communicator.Expire();
  CHECK_EQ(communicator->stats().in_flight, 0);
}

}  // namespace
}  // namespace jaxcomm::testing
