#include "ffi/core/rendezvous.h"

#include <memory>
#include <utility>
#include <vector>

#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

struct Participant {
  bool is_here = false;
  bool has_come() const { return is_here; }
};

using Round = RoundOf<Participant>;

std::unique_ptr<Round> MakeRound(int ranks) {
  auto round = std::make_unique<Round>();
  round->participants.resize(ranks);
  return round;
}

// The round that a rank comes to.
Round* Come(Rendezvous<Round>* rendezvous, int64_t run, uint64_t tag, int rank) {
  Round* round = rendezvous->Find(run, tag, rank);
  if (round == nullptr) round = rendezvous->Open(MakeRound(2), run, tag);
  round->participants[rank].is_here = true;
  return round;
}

TEST(ranks_meet_by_run_and_tag_in_any_order) {
  Rendezvous<Round> rendezvous;
  Round* const a = Come(&rendezvous, 1, 10, 0);
  Round* const b = Come(&rendezvous, 1, 11, 0);
  Round* const c = Come(&rendezvous, 2, 10, 0);
  CHECK_TRUE(Come(&rendezvous, 1, 11, 1) == b);
  CHECK_TRUE(Come(&rendezvous, 2, 10, 1) == c);
  CHECK_TRUE(Come(&rendezvous, 1, 10, 1) == a);
  CHECK_EQ(rendezvous.open().size(), size_t{3});
}

TEST(a_rank_that_is_ahead_opens_further_rounds) {
  Rendezvous<Round> rendezvous;
  std::vector<Round*> rounds;
  for (int i = 0; i < 3; ++i) rounds.push_back(Come(&rendezvous, 1, 10, 0));
  CHECK_EQ(rendezvous.open().size(), size_t{3});
  for (int i = 0; i < 3; ++i) CHECK_TRUE(Come(&rendezvous, 1, 10, 1) == rounds[i]);
  CHECK_TRUE(rendezvous.Find(1, 10, 0) == nullptr);
}

TEST(closed_rounds_are_not_found_and_are_used_again) {
  Rendezvous<Round> rendezvous;
  Round* const first = Come(&rendezvous, 1, 10, 0);
  Round* const second = Come(&rendezvous, 1, 10, 0);
  CHECK_TRUE(rendezvous.TakeSpare() == nullptr);
  rendezvous.Keep(rendezvous.Close(first));
  CHECK_TRUE(rendezvous.Find(1, 10, 1) == second);
  CHECK_EQ(rendezvous.open().size(), size_t{1});
  std::unique_ptr<Round> spare = rendezvous.TakeSpare();
  CHECK_TRUE(spare.get() == first);
  CHECK_TRUE(rendezvous.TakeSpare() == nullptr);
  spare->participants[0].is_here = false;
  CHECK_TRUE(rendezvous.Open(std::move(spare), 3, 12) == first);
  CHECK_TRUE(rendezvous.Find(3, 12, 0) == first);
}

TEST(ranks_that_come_to_a_failed_round_are_refused_once_each) {
  Rendezvous<Round> rendezvous;
  Round* const failed = Come(&rendezvous, 1, 10, 0);
  rendezvous.Refuse(*failed, InvalidArgument("it failed"), 2);
  rendezvous.Keep(rendezvous.Close(failed));
  CHECK_TRUE(rendezvous.TakeRefusal(1, 11).success());
  CHECK_TRUE(rendezvous.TakeRefusal(2, 10).success());
  CHECK_TRUE(rendezvous.RefusedRuns() == std::vector<int64_t>{1});
  CHECK_EQ(rendezvous.TakeRefusal(1, 10).message(), "it failed");
  CHECK_EQ(rendezvous.TakeRefusal(1, 10).message(), "it failed");
  CHECK_TRUE(rendezvous.TakeRefusal(1, 10).success());
  CHECK_TRUE(rendezvous.RefusedRuns().empty());
}

TEST(a_round_that_all_came_to_refuses_nobody) {
  Rendezvous<Round> rendezvous;
  rendezvous.Refuse(*Come(&rendezvous, 1, 10, 0), InvalidArgument("it failed"), 0);
  CHECK_TRUE(rendezvous.TakeRefusal(1, 10).success());
}

TEST(the_oldest_refusals_are_forgotten) {
  Rendezvous<Round> rendezvous;
  for (int run = 0; run < 65; ++run) {
    rendezvous.Refuse(*Come(&rendezvous, run, 10, 0), InvalidArgument("it failed"), 1);
  }
  CHECK_TRUE(rendezvous.TakeRefusal(0, 10).success());
  CHECK_TRUE(rendezvous.TakeRefusal(1, 10).failure());
  CHECK_TRUE(rendezvous.TakeRefusal(64, 10).failure());
}

}  // namespace
}  // namespace jaxcomm::testing
