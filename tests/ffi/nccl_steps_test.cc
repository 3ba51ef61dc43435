// Tests which NCCL functions each collective becomes on each rank. What comes of them:
// tests/collectives, over the stand-in, and tests/nccl/test_library.py for older ones.

#include "ffi/backends/nccl/plans/recipe.h"
#include "ffi/backends/nccl/plans/steps.h"
#include "ffi/core/plan.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

constexpr int kSize = 3;
constexpr const char* kNames[] = {
    "copy",           "zero",       "send",       "recv",      "all_reduce", "reduce",
    "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather",     "scatter"};
static_assert(static_cast<int>(Step::Kind::kScatter) == 11);

// "send 8 from 0 to 16 peer 2": bytes, or elements of a reduction.
std::string Text(const std::vector<Step>& steps) {
  std::string text;
  for (const Step& step : steps) {
    text += StrCat(text.empty() ? "" : "; ", step.leaf > 0 ? "+ " : "",
                   kNames[static_cast<int>(step.kind)], " ", step.count, " from ",
                   step.from, " to ", step.to, " peer ", step.peer);
  }
  return text;
}

ErrorOr<Steps> Make(CallSite& site, int rank, Natives natives = Natives::kOf228,
                    int size = kSize) {
  ASSIGN_OR_RETURN(const Plan plan, site.MakePlan(size, nullptr));
  return MakeSteps(site, plan, rank, natives);
}

// The steps that NCCL does, and those within the rank.
std::string Grouped(CallSite& site, int rank, Natives natives = Natives::kOf228) {
  return Text(Must(Make(site, rank, natives)).grouped);
}
std::string Local(CallSite& site, int rank, Natives natives = Natives::kOf228) {
  return Text(Must(Make(site, rank, natives)).local);
}

Leaf LeafOf(DataType dtype, int64_t elements, size_t bytes) {
  return Leaf{dtype, {elements}, elements, bytes};
}

TEST(contiguous_collectives_are_one_call_of_nccl_on_every_rank) {
  struct Case {
    const char* collective;
    std::vector<int64_t> params;
    int64_t operand, result;
    const char* grouped;
    int root = -1;  // where it is not said "zero"
    const char* zero = "";
  };
  const std::vector<Case> cases = {
      {"all_reduce", {}, 10, 10, "all_reduce 10 from 0 to 0 peer 0"},
      {"all_gather", {1}, 10, 30, "all_gather 40 from 0 to 0 peer 0"},
      {"reduce_scatter", {1}, 30, 10, "reduce_scatter 10 from 0 to 0 peer 0"},
      {"all_to_all", {1, 1, 0}, 6, 6, "all_to_all 8 from 0 to 0 peer 0"},
      {"broadcast", {2}, 10, 10, "broadcast 40 from 0 to 0 peer 2"},
      {"scatter", {2, 1}, 6, 2, "scatter 8 from 0 to 0 peer 2"},
      {"reduce",
       {1},
       10,
       10,
       "reduce 10 from 0 to 0 peer 1",
       1,
       "zero 40 from 0 to 0 peer 0"},
      {"gather",
       {1, 1},
       2,
       6,
       "gather 8 from 0 to 0 peer 1",
       1,
       "zero 24 from 0 to 0 peer 0"},
  };
  for (const Case& test : cases) {
    auto site = FloatSite(test.collective, test.params, test.operand, test.result);
    for (int rank = 0; rank < kSize; ++rank) {
      CHECK_EQ(Grouped(*site, rank), test.grouped);
      CHECK_EQ(Local(*site, rank), rank == test.root ? "" : test.zero);
    }
  }
}

TEST(all_leaves_of_a_hop_go_in_one_group) {
  // The source of each target. Rank 0 has none.
  auto hop = MakeSite("permute", {-1, 0, 1}, {FloatLeaf(10), FloatLeaf(3)},
                      {FloatLeaf(10), FloatLeaf(3)});
  CHECK_EQ(Local(*hop, 0), "zero 40 from 0 to 0 peer 0; + zero 12 from 0 to 0 peer 0");
  const std::string grouped = Grouped(*hop, 1);
  for (const char* expected :
       {"send 40 from 0 to 0 peer 2", "recv 40 from 0 to 0 peer 0",
        "+ send 12 from 0 to 0 peer 2", "+ recv 12 from 0 to 0 peer 0"}) {
    CHECK_CONTAINS(grouped, expected);
  }
  // Who keeps what it has copies it.
  auto stays = FloatSite("permute", {0, 2, 1}, 10);
  CHECK_EQ(Grouped(*stays, 0), "");
  CHECK_EQ(Local(*stays, 0), "copy 40 from 0 to 0 peer 0");
}

TEST(strided_rows_are_calls_of_their_own_in_the_same_order_on_all_ranks) {
  // Two rows of each rank's operand, which lie apart in the result.
  auto gathered = FloatSite("all_gather", {2}, 10, 30);
  CHECK_CONTAINS(Grouped(*gathered, 0), "send 20 from 20 to 60 peer 1");
  CHECK_CONTAINS(Local(*gathered, 0), "copy 20 from 20 to 60");
  auto scattered = FloatSite("reduce_scatter", {2}, 30, 10);
  const std::string first = Grouped(*scattered, 0);
  CHECK_EQ(first, Grouped(*scattered, 2));
  for (const char* expected :
       {"reduce 5 from 60 to 20 peer 0", "reduce 5 from 20 to 0 peer 1"}) {
    CHECK_CONTAINS(first, expected);
  }
}

TEST(what_has_no_elements_asks_for_nothing_and_who_is_alone_copies) {
  for (const char* collective : {"all_reduce", "barrier"}) {
    auto empty = FloatSite(collective, {}, 0);
    CHECK_EQ(Grouped(*empty, 0) + Local(*empty, 0), "");
  }
  for (const bool sums : {true, false}) {
    auto site =
        sums ? FloatSite("all_reduce", {}, 10) : FloatSite("broadcast", {0}, 10);
    const Steps steps = Must(Make(*site, 0, Natives::kOf228, /*size=*/1));
    CHECK_EQ(Text(steps.grouped), "");
    CHECK_EQ(Text(steps.local), "copy 40 from 0 to 0 peer 0");
  }
}

TEST(numbers_keep_their_types_and_other_bytes_travel_as_bytes) {
  struct Case {
    DataType dtype;
    size_t bytes;
    ReduceOp op;
    nccl::Type type;
    nccl::RedOp expected;
    size_t count = 4;
  };
  const std::vector<Case> cases = {
      {DataType::S8, 1, ReduceOp::kSum, nccl::Type::kInt8, nccl::RedOp::kSum},
      {DataType::U64, 8, ReduceOp::kProduct, nccl::Type::kUint64, nccl::RedOp::kProd},
      {DataType::BF16, 2, ReduceOp::kSum, nccl::Type::kBfloat16, nccl::RedOp::kSum},
      {DataType::F16, 2, ReduceOp::kMax, nccl::Type::kFloat16, nccl::RedOp::kMax},
      {DataType::F64, 8, ReduceOp::kMin, nccl::Type::kFloat64, nccl::RedOp::kMin},
      {DataType::PRED, 1, ReduceOp::kMax, nccl::Type::kUint8, nccl::RedOp::kMax},
      // A complex number is two.
      {DataType::C64, 8, ReduceOp::kSum, nccl::Type::kFloat32, nccl::RedOp::kSum, 8},
  };
  for (const Case& test : cases) {
    const Leaf leaf = LeafOf(test.dtype, 4, test.bytes);
    const Steps sum =
        Must(Make(*MakeSite("all_reduce", {}, {leaf}, {leaf}, test.op), 0));
    CHECK_EQ(sum.grouped.size(), size_t{1});
    CHECK_TRUE(sum.grouped[0].type == test.type);
    CHECK_TRUE(sum.grouped[0].op == test.expected);
    CHECK_EQ(sum.grouped[0].count, test.count);
    const Steps move = Must(Make(*MakeSite("broadcast", {1}, {leaf}, {leaf}), 0));
    CHECK_TRUE(move.grouped[0].type == nccl::Type::kInt8);
    CHECK_EQ(move.grouped[0].count, 4 * test.bytes);
  }
}

TEST(what_nccl_cannot_reduce_is_refused_by_name) {
  const auto refusal = [](DataType dtype, size_t bytes, ReduceOp op) {
    const Leaf leaf = LeafOf(dtype, 4, bytes);
    return Make(*MakeSite("all_reduce", {}, {leaf}, {leaf}, op), 0).status();
  };
  CHECK_FAILS(refusal(DataType::S16, 2, ReduceOp::kSum), "NCCL has no sum of int16");
  CHECK_FAILS(refusal(DataType::PRED, 1, ReduceOp::kSum), "NCCL has no sum of bool");
  CHECK_FAILS(refusal(DataType::C64, 8, ReduceOp::kProduct),
              "NCCL has no prod of complex64");
  CHECK_FAILS(Make(*FloatSite("scan", {0, 0}, 10), 0).status(), "NCCL has no scan");
}

// A rank of a group of kSize, at a place of the same number.
RankFacts RankOf(int rank) {
  RankFacts facts;
  facts.rank = rank;
  facts.size = kSize;
  facts.place = static_cast<size_t>(rank);
  return facts;
}

TEST(a_plan_that_reads_operands_is_refused_by_name) {
  const Leaf index = LeafOf(DataType::S32, kSize, 4);
  auto site = MakeSite("ragged_all_to_all", {},
                       {FloatLeaf(9), FloatLeaf(9), index, index, index, index},
                       {FloatLeaf(9)});
  const NcclLibrary library{};
  Recipes recipes(library, 1);
  for (int call = 0; call < 2; ++call) {
    const Status status = recipes.Find(*site, RankOf(0), /*with_copies=*/true).status();
    CHECK_TRUE(status.errc() == ErrorCode::kInvalidArgument);
    CHECK_FAILS(status, "ragged_all_to_all(float32[9], ");
    CHECK_FAILS(status, "depends on the values of its operands");
  }
}

TEST(steps_are_made_once_for_each_rank_of_each_communicator) {
  auto site = FloatSite("broadcast", {1}, 2);
  const NcclLibrary library{};
  Recipes recipes(library, 2), newer(library, 2);
  const auto find = [&](Recipes& of, int rank) {
    return Must(of.Find(*site, RankOf(rank), /*with_copies=*/false));
  };
  const Recipe* const first = find(recipes, 0);
  CHECK_TRUE(first == find(recipes, 0));
  CHECK_TRUE(first != find(recipes, 1) && first != find(newer, 0));
  // Ranks of a communicator share the copies of a call.
  auto large = FloatSite("permute", {1, 2, 0}, kLeastCopiedBytes / 4);
  const auto copies = [&](int rank) {
    return Must(recipes.Find(*large, RankOf(rank), /*with_copies=*/true))->copies;
  };
  CHECK_TRUE(copies(0) != nullptr && copies(0) == copies(1));
}

}  // namespace
}  // namespace jaxcomm::testing
