// Tests which NCCL functions each collective becomes on each rank.
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/backends/nccl/recipe.h"
#include "ffi/backends/nccl/steps.h"
#include "ffi/core/plan.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

constexpr int kSize = 3;

const char* NameOf(Step::Kind kind) {
  switch (kind) {
    case Step::Kind::kCopy:
      return "copy";
    case Step::Kind::kZero:
      return "zero";
    case Step::Kind::kSend:
      return "send";
    case Step::Kind::kRecv:
      return "recv";
    case Step::Kind::kAllReduce:
      return "all_reduce";
    case Step::Kind::kReduce:
      return "reduce";
    case Step::Kind::kReduceScatter:
      return "reduce_scatter";
    case Step::Kind::kAllGather:
      return "all_gather";
    case Step::Kind::kAllToAll:
      return "all_to_all";
    case Step::Kind::kBroadcast:
      return "broadcast";
    case Step::Kind::kGather:
      return "gather";
    case Step::Kind::kScatter:
      return "scatter";
  }
  return "unknown";
}

// "send 8 from 0 to 16 peer 2": bytes, or elements of a reduction.
std::string Text(const Step& step) {
  return StrCat(NameOf(step.kind), " ", step.count, " from ", step.from, " to ",
                step.to, " peer ", step.peer);
}

std::string Text(const std::vector<Step>& steps) {
  std::string text;
  for (const Step& step : steps) {
    text += StrCat(text.empty() ? "" : "; ", step.leaf > 0 ? "+ " : "", Text(step));
  }
  return text;
}

ErrorOr<Steps> Make(CallSite& site, int size, int rank,
                    Natives natives = Natives::kOf228) {
  ASSIGN_OR_RETURN(const Plan plan, site.MakePlan(size, nullptr));
  return MakeSteps(site, plan, rank, natives);
}

// A rank of a group of kSize, at a place of the same number.
RankFacts Rank(int rank) {
  RankFacts facts;
  facts.rank = rank;
  facts.size = kSize;
  facts.place = static_cast<size_t>(rank);
  return facts;
}

// The steps that NCCL does.
std::string Grouped(CallSite& site, int rank, Natives natives = Natives::kOf228) {
  const auto steps = Make(site, kSize, rank, natives);
  return steps ? Text(steps->grouped) : steps.error().message();
}

// The steps within the rank.
std::string Local(CallSite& site, int rank, Natives natives = Natives::kOf228) {
  const auto steps = Make(site, kSize, rank, natives);
  return steps ? Text(steps->local) : steps.error().message();
}

Leaf LeafOf(DataType dtype, int64_t elements, size_t bytes) {
  return Leaf{dtype, {elements}, elements, bytes};
}

TEST(contiguous_collectives_are_one_call_of_nccl_on_every_rank) {
  struct Case {
    const char* collective;
    std::vector<int64_t> params;
    int64_t operand, result;
    const char* expected;
  };
  const std::vector<Case> cases = {
      {"all_reduce", {}, 10, 10, "all_reduce 10 from 0 to 0 peer 0"},
      {"all_gather", {1}, 10, 30, "all_gather 40 from 0 to 0 peer 0"},
      {"reduce_scatter", {1}, 30, 10, "reduce_scatter 10 from 0 to 0 peer 0"},
      {"all_to_all", {1, 1, 0}, 6, 6, "all_to_all 8 from 0 to 0 peer 0"},
      {"broadcast", {2}, 10, 10, "broadcast 40 from 0 to 0 peer 2"},
  };
  for (const Case& test : cases) {
    auto site = MakeSite(test.collective, test.params, {FloatLeaf(test.operand)},
                         {FloatLeaf(test.result)});
    for (int rank = 0; rank < kSize; ++rank) {
      CHECK_EQ(Grouped(*site, rank), test.expected);
      CHECK_EQ(Local(*site, rank), "");
    }
  }
}

TEST(a_reduction_to_a_root_is_one_call_and_zeros_elsewhere) {
  auto site = MakeSite("reduce", {1}, {FloatLeaf(10)}, {FloatLeaf(10)});
  for (int rank = 0; rank < kSize; ++rank) {
    CHECK_EQ(Grouped(*site, rank), "reduce 10 from 0 to 0 peer 1");
    CHECK_EQ(Local(*site, rank), rank == 1 ? "" : "zero 40 from 0 to 0 peer 0");
  }
}

TEST(a_hop_sends_and_receives_in_one_group) {
  // The source of each target. Rank 0 has none.
  auto site = MakeSite("permute", {-1, 0, 1}, {FloatLeaf(10)}, {FloatLeaf(10)});
  CHECK_EQ(Grouped(*site, 0), "send 40 from 0 to 0 peer 1");
  CHECK_EQ(Local(*site, 0), "zero 40 from 0 to 0 peer 0");
  const Steps steps = Must(Make(*site, kSize, 1));
  CHECK_EQ(steps.grouped.size(), size_t{2});
  CHECK_CONTAINS(Text(steps.grouped), "recv 40 from 0 to 0 peer 0");
  CHECK_CONTAINS(Text(steps.grouped), "send 40 from 0 to 0 peer 2");
  CHECK_EQ(Grouped(*site, 2), "recv 40 from 0 to 0 peer 1");
  CHECK_EQ(Local(*site, 2), "");
}

TEST(who_keeps_what_it_has_copies_it) {
  auto site = MakeSite("permute", {0, 2, 1}, {FloatLeaf(10)}, {FloatLeaf(10)});
  CHECK_EQ(Grouped(*site, 0), "");
  CHECK_EQ(Local(*site, 0), "copy 40 from 0 to 0 peer 0");
}

TEST(all_leaves_of_a_hop_go_in_one_group) {
  auto site = MakeSite("permute", {2, 0, 1}, {FloatLeaf(10), FloatLeaf(3)},
                       {FloatLeaf(10), FloatLeaf(3)});
  const Steps steps = Must(Make(*site, kSize, 0));
  CHECK_EQ(steps.grouped.size(), size_t{4});
  for (const char* expected :
       {"send 40 from 0 to 0 peer 1", "recv 40 from 0 to 0 peer 2",
        "+ send 12 from 0 to 0 peer 1", "+ recv 12 from 0 to 0 peer 2"}) {
    CHECK_CONTAINS(Text(steps.grouped), expected);
  }
}

TEST(an_old_library_exchanges_with_sends) {
  auto site = MakeSite("all_to_all", {1, 1, 0}, {FloatLeaf(6)}, {FloatLeaf(6)});
  const std::string grouped = Grouped(*site, 1, Natives::kOf218);
  for (const char* expected :
       {"send 8 from 0 to 8 peer 0", "recv 8 from 8 to 0 peer 0",
        "send 8 from 16 to 8 peer 2", "recv 8 from 8 to 16 peer 2"}) {
    CHECK_CONTAINS(grouped, expected);
  }
  CHECK_EQ(Local(*site, 1, Natives::kOf218), "copy 8 from 8 to 8 peer 0");
}

TEST(gather_and_scatter_are_one_call_and_zeros_elsewhere) {
  auto gather = MakeSite("gather", {1, 1}, {FloatLeaf(2)}, {FloatLeaf(6)});
  auto scatter = MakeSite("scatter", {2, 1}, {FloatLeaf(6)}, {FloatLeaf(2)});
  for (int rank = 0; rank < kSize; ++rank) {
    CHECK_EQ(Grouped(*gather, rank), "gather 8 from 0 to 0 peer 1");
    CHECK_EQ(Local(*gather, rank), rank == 1 ? "" : "zero 24 from 0 to 0 peer 0");
    CHECK_EQ(Grouped(*scatter, rank), "scatter 8 from 0 to 0 peer 2");
    CHECK_EQ(Local(*scatter, rank), "");
  }
}

TEST(an_old_library_gathers_and_scatters_with_sends) {
  const auto of = [](CallSite& site, int rank) {
    return Grouped(site, rank, Natives::kOf218);
  };
  auto gather = MakeSite("gather", {1, 1}, {FloatLeaf(2)}, {FloatLeaf(6)});
  CHECK_CONTAINS(of(*gather, 1), "recv 8 from 0 to 0 peer 0");
  CHECK_CONTAINS(of(*gather, 1), "recv 8 from 0 to 16 peer 2");
  CHECK_EQ(Local(*gather, 1, Natives::kOf218), "copy 8 from 0 to 8 peer 0");
  CHECK_EQ(of(*gather, 0), "send 8 from 0 to 0 peer 1");
  CHECK_EQ(Local(*gather, 0, Natives::kOf218), "zero 24 from 0 to 0 peer 0");
  auto scatter = MakeSite("scatter", {0, 1}, {FloatLeaf(6)}, {FloatLeaf(2)});
  CHECK_CONTAINS(of(*scatter, 0), "send 8 from 8 to 0 peer 1");
  CHECK_CONTAINS(of(*scatter, 0), "send 8 from 16 to 0 peer 2");
  CHECK_EQ(of(*scatter, 2), "recv 8 from 16 to 0 peer 0");
}

TEST(strided_rows_of_a_gather_are_sends) {
  // [2, 1] of each rank to [2, 3]: rows that lie apart in the result.
  auto gather = MakeSite("gather", {1, 2}, {FloatLeaf(2)}, {FloatLeaf(6)});
  CHECK_EQ(Grouped(*gather, 0),
           "send 4 from 0 to 0 peer 1; send 4 from 4 to 12 peer 1");
}

TEST(strided_rows_are_calls_of_their_own_in_the_same_order_on_all_ranks) {
  // Two rows of each rank's operand, which lie apart in the result.
  auto gathered = MakeSite("all_gather", {2}, {FloatLeaf(10)}, {FloatLeaf(30)});
  const std::string grouped = Grouped(*gathered, 0);
  for (const char* expected :
       {"send 20 from 0 to 0 peer 1", "send 20 from 20 to 60 peer 1",
        "recv 20 from 0 to 20 peer 1", "recv 20 from 20 to 80 peer 1"}) {
    CHECK_CONTAINS(grouped, expected);
  }
  CHECK_CONTAINS(Local(*gathered, 0), "copy 20 from 20 to 60");
  auto scattered = MakeSite("reduce_scatter", {2}, {FloatLeaf(30)}, {FloatLeaf(10)});
  const std::string first = Grouped(*scattered, 0);
  CHECK_EQ(first, Grouped(*scattered, 2));
  for (const char* expected :
       {"reduce 5 from 0 to 0 peer 0", "reduce 5 from 60 to 20 peer 0",
        "reduce 5 from 20 to 0 peer 1", "reduce 5 from 100 to 20 peer 2"}) {
    CHECK_CONTAINS(first, expected);
  }
}

TEST(an_exchange_of_strided_rows_is_sends_and_never_one_call) {
  // [2, 3, 2] -> [3, 2, 2]: the rows of one piece lie apart on one side.
  auto site = MakeSite("all_to_all", {1, 2, 0}, {FloatLeaf(12)}, {FloatLeaf(12)});
  const std::string grouped = Grouped(*site, 0);
  for (const char* expected :
       {"send 8 from 8 to 0 peer 1", "send 8 from 32 to 8 peer 1",
        "recv 8 from 0 to 16 peer 1", "recv 8 from 24 to 24 peer 1"}) {
    CHECK_CONTAINS(grouped, expected);
  }
  CHECK_EQ(Local(*site, 0), "copy 8 from 0 to 0 peer 0; copy 8 from 24 to 8 peer 0");
}

TEST(what_has_no_elements_asks_for_nothing) {
  for (const char* collective : {"all_reduce", "barrier"}) {
    auto site = MakeSite(collective, {}, {FloatLeaf(0)}, {FloatLeaf(0)});
    if (site == nullptr) continue;
    CHECK_EQ(Grouped(*site, 0), "");
    CHECK_EQ(Local(*site, 0), "");
  }
  auto site = MakeSite("permute", {1, 2, 0}, {FloatLeaf(0)}, {FloatLeaf(0)});
  CHECK_EQ(Grouped(*site, 0), "");
}

TEST(numbers_keep_their_types_and_other_bytes_travel_as_bytes) {
  struct Case {
    DataType dtype;
    size_t bytes;
    ReduceOp op;
    nccl::Type type;
    size_t count;
  };
  const std::vector<Case> cases = {
      {DataType::S8, 1, ReduceOp::kSum, nccl::Type::kInt8, 4},
      {DataType::U64, 8, ReduceOp::kProduct, nccl::Type::kUint64, 4},
      {DataType::BF16, 2, ReduceOp::kSum, nccl::Type::kBfloat16, 4},
      {DataType::F16, 2, ReduceOp::kMax, nccl::Type::kFloat16, 4},
      {DataType::F64, 8, ReduceOp::kMin, nccl::Type::kFloat64, 4},
      {DataType::PRED, 1, ReduceOp::kMax, nccl::Type::kUint8, 4},
      // A complex number is two.
      {DataType::C64, 8, ReduceOp::kSum, nccl::Type::kFloat32, 8},
      {DataType::C128, 16, ReduceOp::kSum, nccl::Type::kFloat64, 8},
  };
  for (const Case& test : cases) {
    const Leaf leaf = LeafOf(test.dtype, 4, test.bytes);
    auto site = MakeSite("all_reduce", {}, {leaf}, {leaf}, test.op);
    const Steps steps = Must(Make(*site, kSize, 0));
    CHECK_EQ(steps.grouped.size(), size_t{1});
    CHECK_TRUE(steps.grouped[0].type == test.type);
    CHECK_EQ(steps.grouped[0].count, test.count);
    auto moved = MakeSite("broadcast", {1}, {leaf}, {leaf});
    const Steps moves = Must(Make(*moved, kSize, 0));
    CHECK_TRUE(moves.grouped[0].type == nccl::Type::kInt8);
    CHECK_EQ(moves.grouped[0].count, 4 * test.bytes);
  }
}

TEST(reductions_keep_their_operations) {
  const std::vector<std::pair<ReduceOp, nccl::RedOp>> ops = {
      {ReduceOp::kSum, nccl::RedOp::kSum},
      {ReduceOp::kProduct, nccl::RedOp::kProd},
      {ReduceOp::kMax, nccl::RedOp::kMax},
      {ReduceOp::kMin, nccl::RedOp::kMin},
  };
  for (const auto& [asked, expected] : ops) {
    auto site = MakeSite("all_reduce", {}, {FloatLeaf(1)}, {FloatLeaf(1)}, asked);
    const Steps steps = Must(Make(*site, kSize, 0));
    CHECK_TRUE(steps.grouped[0].op == expected);
  }
}

TEST(what_nccl_cannot_reduce_is_refused_by_name) {
  const auto refusal = [](DataType dtype, size_t bytes, ReduceOp op) {
    const Leaf leaf = LeafOf(dtype, 4, bytes);
    auto site = MakeSite("all_reduce", {}, {leaf}, {leaf}, op);
    return Grouped(*site, 0);
  };
  CHECK_CONTAINS(refusal(DataType::S16, 2, ReduceOp::kSum), "NCCL has no sum of int16");
  CHECK_CONTAINS(refusal(DataType::PRED, 1, ReduceOp::kSum), "NCCL has no sum of bool");
  CHECK_CONTAINS(refusal(DataType::C64, 8, ReduceOp::kProduct),
                 "NCCL has no prod of complex64");
  auto scan = MakeSite("scan", {0, 0}, {FloatLeaf(10)}, {FloatLeaf(10)});
  CHECK_CONTAINS(Grouped(*scan, 0), "NCCL has no scan");
}

TEST(a_plan_that_reads_operands_is_refused_by_name) {
  const Leaf index = LeafOf(DataType::S32, kSize, 4);
  auto site = MakeSite("ragged_all_to_all", {},
                       {FloatLeaf(9), FloatLeaf(9), index, index, index, index},
                       {FloatLeaf(9)});
  const NcclLibrary library{};
  Recipes recipes(library, 1);
  for (int call = 0; call < 2; ++call) {
    const Status status = recipes.Find(*site, Rank(0), /*with_copies=*/true).status();
    CHECK_TRUE(status.errc() == ErrorCode::kInvalidArgument);
    CHECK_CONTAINS(status.message(), "ragged_all_to_all(float32[9], ");
    CHECK_CONTAINS(status.message(), "depends on the values of its operands");
  }
}

TEST(steps_are_made_once_for_each_rank_of_each_communicator) {
  auto site = MakeSite("broadcast", {1}, {FloatLeaf(2)}, {FloatLeaf(2)});
  const NcclLibrary library{};
  Recipes recipes(library, 2), newer(library, 2);
  const auto find = [&](Recipes& of, int rank) {
    return Must(of.Find(*site, Rank(rank), /*with_copies=*/false));
  };
  const Recipe* const first = find(recipes, 0);
  CHECK_TRUE(first == find(recipes, 0));
  CHECK_TRUE(first != find(recipes, 1) && first != find(newer, 0));
}

TEST(ranks_of_a_communicator_share_the_copies_of_a_call) {
  const Leaf large = FloatLeaf(kLeastCopiedBytes / 4);
  auto site = MakeSite("permute", {1, 2, 0}, {large}, {large});
  const NcclLibrary library{};
  Recipes recipes(library, 2);
  const auto find = [&](int rank) {
    return Must(recipes.Find(*site, Rank(rank), /*with_copies=*/true))->copies;
  };
  CHECK_TRUE(find(0) != nullptr && find(0) == find(1));
}

TEST(alone_in_a_group_all_is_copies) {
  for (const char* collective : {"all_reduce", "broadcast"}) {
    std::vector<int64_t> params;
    if (std::string(collective) == "broadcast") params = {0};
    auto site = MakeSite(collective, params, {FloatLeaf(10)}, {FloatLeaf(10)});
    const Steps steps = Must(Make(*site, 1, 0));
    CHECK_EQ(Text(steps.grouped), "");
    CHECK_EQ(Text(steps.local), "copy 40 from 0 to 0 peer 0");
  }
}

}  // namespace
}  // namespace jaxcomm::testing
