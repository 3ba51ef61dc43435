// Tests which NCCL functions each collective becomes. What comes of them, of every type
// and along every dimension: tests/collectives, over the stand-in, and
// tests/nccl/test_library.py for older ones.

#include "ffi/backends/nccl/plans/recipe.h"
#include "ffi/backends/nccl/plans/steps.h"
#include "ffi/core/plan.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

constexpr int kSize = 3;

ErrorOr<Steps> Make(CallSite& site, int rank = 0) {
  ASSIGN_OR_RETURN(const Plan plan, site.MakePlan(kSize, nullptr));
  return MakeSteps(site, plan, rank, Natives::kOf228);
}

Leaf LeafOf(DataType dtype, int64_t elements, size_t bytes) {
  return Leaf{dtype, {elements}, elements, bytes};
}

TEST(contiguous_collectives_are_one_call_of_nccl_on_every_rank) {
  using Kind = Step::Kind;
  struct Case {
    const char* collective;
    std::vector<int64_t> params;
    int64_t operand, result;
    Kind kind;
  };
  const std::vector<Case> cases = {
      {"all_reduce", {}, 10, 10, Kind::kAllReduce},
      {"all_gather", {1}, 10, 30, Kind::kAllGather},
      {"reduce_scatter", {1}, 30, 10, Kind::kReduceScatter},
      {"all_to_all", {1, 1, 0}, 6, 6, Kind::kAllToAll},
      {"broadcast", {2}, 10, 10, Kind::kBroadcast},
      {"scatter", {2, 1}, 6, 2, Kind::kScatter},
      {"reduce", {1}, 10, 10, Kind::kReduce},
      {"gather", {1, 1}, 2, 6, Kind::kGather},
  };
  for (const Case& test : cases) {
    auto site = FloatSite(test.collective, test.params, test.operand, test.result);
    for (int rank = 0; rank < kSize; ++rank) {
      const Steps steps = Must(Make(*site, rank));
      CHECK_EQ(steps.grouped.size(), size_t{1});
      CHECK_TRUE(steps.grouped[0].kind == test.kind);
    }
  }
  // Who keeps what it has copies it, and what has no elements asks for nothing.
  auto stays = FloatSite("permute", {0, 2, 1}, 10), empty = FloatSite("barrier", {}, 0);
  for (CallSite* site : {stays.get(), empty.get()}) {
    CHECK_TRUE(Must(Make(*site)).grouped.empty());
  }
}

TEST(an_older_nccl_sends_and_receives_what_it_has_no_function_for) {
  const auto steps_of = [](const char* collective, std::vector<int64_t> params,
                           int64_t operand, int64_t result, int rank) {
    auto site = FloatSite(collective, std::move(params), operand, result);
    const Plan plan = Must(site->MakePlan(kSize, nullptr));
    return Must(MakeSteps(*site, plan, rank, Natives::kOf218));
  };
  for (int rank = 0; rank < kSize; ++rank) {
    // What each rank sends and receives, but for its own.
    const size_t of_all = 2 * (kSize - 1), of_root = kSize - 1;
    const size_t rooted = rank == 1 ? of_root : 1;
    const std::vector<std::pair<Steps, size_t>> cases = {
        {steps_of("all_to_all", {1, 1, 0}, 6, 6, rank), of_all},
        {steps_of("scatter", {1, 1}, 6, 2, rank), rooted},
        {steps_of("gather", {1, 1}, 2, 6, rank), rooted},
    };
    for (const auto& [steps, count] : cases) {
      CHECK_EQ(steps.grouped.size(), count);
      for (const Step& step : steps.grouped) {
        CHECK_TRUE(step.kind == Step::Kind::kSend || step.kind == Step::Kind::kRecv);
      }
    }
  }
}

TEST(rows_are_packed_on_the_side_where_they_lie_apart) {
  constexpr int64_t kRows = 4, kRow = 128, kBytes = kRow * 4;
  const Leaf leaf = FloatLeaf(kSize * kRows * kRow);
  const auto steps_of = [&](int64_t split_first, int64_t outer, size_t results) {
    auto site = MakeSite("all_to_all", {outer, kRows / outer, split_first}, {leaf},
                         std::vector<Leaf>(results, leaf));
    return Must(Make(*site));
  };
  for (const bool sends_rows : {true, false}) {
    const Steps steps = steps_of(sends_rows ? 0 : 1, 1, 2);
    const std::vector<Step>& packed = sends_rows ? steps.local : steps.behind;
    CHECK_EQ(packed.size(), size_t{2} + sends_rows);  // with its own copy
    CHECK_EQ(steps.grouped.size(), size_t{4});
    int64_t at = 0;
    for (const Step& step : steps.grouped) {
      CHECK_EQ(step.bytes(), kRows * kBytes);
      CHECK_EQ(step.from_room, sends_rows ? 1 : -1);
      CHECK_EQ(step.to_room, sends_rows ? -1 : 1);
      if ((step.kind == Step::Kind::kSend) != sends_rows) continue;
      CHECK_EQ(sends_rows ? step.from : step.to, at);
      at += step.bytes();
    }
  }
  // One by one: without room, or where neither side is contiguous.
  CHECK_EQ(steps_of(0, 1, 1).grouped.size(), size_t{4 * kRows});
  CHECK_EQ(steps_of(0, kRows, 2).grouped.size(), size_t{4 * kRows});
}

TEST(copies_take_rows_at_once_unless_they_are_small) {
  const auto copies_of = [](int64_t rows) {
    auto site = FloatSite("all_gather", {rows}, 8 << 20, kSize * (8 << 20));
    const Plan plan = Must(site->MakePlan(kSize, nullptr));
    return MakePeerPlan(*site, plan).copies;
  };
  const int64_t most = (32 << 20) / kLeastBytesOfRow;
  CHECK_EQ(copies_of(most), 2 * kSize - 1);
  CHECK_EQ(copies_of(2 * most), (2 * kSize - 1) * 2 * most);
}

TEST(what_nccl_cannot_reduce_is_refused_by_name) {
  const auto refusal = [](DataType dtype, size_t bytes, ReduceOp op) {
    const Leaf leaf = LeafOf(dtype, 4, bytes);
    return Make(*MakeSite("all_reduce", {}, {leaf}, {leaf}, op)).status();
  };
  CHECK_FAILS(refusal(DataType::S16, 2, ReduceOp::kSum), "NCCL has no sum of int16");
  CHECK_FAILS(refusal(DataType::PRED, 1, ReduceOp::kSum), "NCCL has no sum of bool");
  CHECK_FAILS(refusal(DataType::C64, 8, ReduceOp::kProduct),
              "NCCL has no prod of complex64");
  CHECK_FAILS(Make(*FloatSite("scan", {0, 0}, 10)).status(), "NCCL has no scan");
}

TEST(a_plan_that_reads_operands_is_refused_by_name) {
  const Leaf index = LeafOf(DataType::S32, kSize, 4);
  auto site = MakeSite("ragged_all_to_all", {},
                       {FloatLeaf(9), FloatLeaf(9), index, index, index, index},
                       {FloatLeaf(9)});
  RankFacts rank;
  rank.size = kSize;
  const NcclLibrary library{};
  Recipes recipes(library, 1);
  for (int call = 0; call < 2; ++call) {
    const Status status = recipes.Find(*site, rank, {/*of_process=*/true}).status();
    CHECK_TRUE(status.errc() == ErrorCode::kInvalidArgument);
    CHECK_FAILS(status, "ragged_all_to_all(float32[9], ");
    CHECK_FAILS(status, "depends on the values of its operands");
  }
}

}  // namespace
}  // namespace jaxcomm::testing
