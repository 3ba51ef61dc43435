#include "ffi/core/plan.h"

#include <random>

#include "ffi/planners/collectives.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

struct Case {
  const char* collective;
  std::vector<int64_t> params;
  int64_t operand, result;
};

Leaf Integers(int64_t elements) { return {DataType::S32, {elements}, elements, 4}; }

// The error of a call site that groups of three ranks cannot have.
std::string Refusal(const std::string& collective, std::vector<int64_t> params,
                    std::vector<Leaf> operands, std::vector<Leaf> results) {
  auto site =
      MakeSite(collective, std::move(params), std::move(operands), std::move(results));
  const std::vector<const void*> none(8, nullptr);
  const std::vector<const void* const*> operands_of(3, none.data());
  const bool reads = site->plan_reads_operands();
  const Status status =
      site->MakePlan(3, reads ? operands_of.data() : nullptr).status();
  return status.success() ? "" : status.message();
}

std::string Refusal(const Case& of) {
  return Refusal(of.collective, of.params, {FloatLeaf(of.operand)},
                 {FloatLeaf(of.result)});
}

TEST(permutations_of_the_wrong_size_and_ranks_outside_the_group_are_refused) {
  CHECK_EQ(Refusal({"permute", {0, 1}, 1, 1}),
           "permute(float32[1]) with parameters [0, 1] over axes ('x',): a permutation "
           "of 2 ranks was given to a group of 3");
  for (int64_t rank : {-2, 3, 1 << 30}) {
    CHECK_CONTAINS(Refusal({"permute", {0, rank, 1}, 1, 1}),
                   StrCat("rank ", rank, " is not one of the group's 3"));
  }
  for (int64_t root : std::vector<int64_t>{-1, 3, int64_t{1} << 40}) {
    const std::string expected = StrCat("rank ", root, " is not one of the group's 3");
    for (const Case& of : std::vector<Case>{{"broadcast", {root}, 1, 1},
                                            {"reduce", {root}, 1, 1},
                                            {"gather", {root, 1}, 1, 3},
                                            {"scatter", {root, 1}, 3, 1}}) {
      CHECK_CONTAINS(Refusal(of), expected);
    }
  }
}

TEST(parameters_that_are_missing_or_too_many_are_refused) {
  const std::vector<Case> cases = {
      {"all_gather", {}, 1, 3},  {"all_gather", {1, 1}, 1, 3},
      {"all_reduce", {1}, 1, 1}, {"all_to_all", {1, 1}, 3, 3},
      {"broadcast", {}, 1, 1},   {"gather", {0}, 1, 3},
      {"reduce", {}, 1, 1},      {"reduce_scatter", {}, 3, 1},
      {"scan", {0}, 1, 1},       {"scatter", {0}, 3, 1},
      {"barrier", {1}, 1, 1},
  };
  for (const Case& test : cases) {
    CHECK_CONTAINS(Refusal(test), " parameters, not ");
  }
}

TEST(shapes_that_do_not_divide_are_refused) {
  const std::vector<Case> cases = {
      {"all_gather", {1}, 2, 5},        {"all_gather", {3}, 2, 6},
      {"all_gather", {-1}, 2, 6},       {"all_gather", {0}, 2, 6},
      {"all_reduce", {}, 2, 3},         {"all_to_all", {2, 1, 0}, 9, 9},
      {"all_to_all", {1, -1, 0}, 9, 9}, {"all_to_all", {1, 0, 0}, 9, 9},
      {"all_to_all", {1, 1, 0}, 9, 6},  {"all_to_all", {1LL << 62, 4, 1}, 9, 9},
      {"broadcast", {0}, 2, 3},         {"gather", {0, 1}, 2, 2},
      {"permute", {0, 1, 2}, 3, 2},     {"reduce", {0}, 2, 3},
      {"reduce_scatter", {1}, 4, 1},    {"scan", {0, 0}, 2, 3},
      {"scatter", {0, 2}, 9, 3},        {"barrier", {}, 4, 5},
  };
  for (const Case& test : cases) {
    CHECK_CONTAINS(Refusal(test), "leaf 0: an operand of ");
  }
  CHECK_CONTAINS(Refusal("all_reduce", {}, {FloatLeaf(1)}, {}),
                 "1 operands and 0 results");
  CHECK_CONTAINS(Refusal("all_reduce", {}, {FloatLeaf(1)}, {Integers(1)}),
                 "different types");
  CHECK_CONTAINS(Refusal({"check_positions", {}, 3, 3}),
                 "mistakes are rows of 3 int32");
  CHECK_CONTAINS(Refusal("check_positions", {}, {Integers(3)}, {Integers(6)}),
                 "leaf 0: an operand of 3 elements and a result of 6");
  CHECK_EQ(Refusal({"barrier", {}, 4, 4}), "");
}

TEST(ragged_slices_that_do_not_fit_are_refused) {
  const auto refusal = [](std::vector<Leaf> operands, int64_t result = 9) {
    return Refusal("ragged_all_to_all", {}, std::move(operands), {FloatLeaf(result)});
  };
  const Leaf rows = FloatLeaf(9), three = Integers(3);
  for (int64_t slices : {0, 1, 2, 4}) {
    const Leaf index = Integers(slices);
    CHECK_CONTAINS(refusal({rows, rows, index, index, index, index}),
                   StrCat("there are ", slices, " slices for 3 ranks"));
  }
  CHECK_CONTAINS(refusal({rows, rows, three}), "3 operands, 1 results");
  for (const Leaf& last : {Integers(6), FloatLeaf(3)}) {
    CHECK_CONTAINS(refusal({rows, rows, three, three, three, last}), "3 integers each");
  }
  const Leaf scalar{DataType::F32, {}, 1, 4};
  CHECK_CONTAINS(refusal({scalar, rows, three, three, three, three}),
                 "not rows of one kind");
  CHECK_CONTAINS(refusal({rows, rows, three, three, three, three}, 8),
                 "not rows of one kind");
}

// The slice that a rank sends itself, by numbers of a type without a sign.
template <typename T>
Plan::Slice OwnSlice(DataType type, T from, T to) {
  const Leaf rows{DataType::U8, {4'000'000'000, 1}, 4'000'000'000, 1};
  const Leaf number{type, {1}, 1, sizeof(T)};
  auto site = MakeSite("ragged_all_to_all", {},
                       {rows, rows, number, number, number, number}, {rows});
  const T one = 1;
  const void* operands[] = {nullptr, nullptr, &from, &one, &to, &one};
  const void* const* of_ranks[] = {operands};
  return Must(site->MakePlan(1, of_ranks)).slices.at(0);
}

TEST(numbers_of_ragged_slices_have_no_sign_if_their_type_has_none) {
  const auto check = [](DataType type, auto largest) {
    const auto slice = OwnSlice<decltype(largest)>(type, largest, largest - 1);
    CHECK_EQ(slice.from, static_cast<int64_t>(largest));
    CHECK_EQ(slice.to, static_cast<int64_t>(largest) - 1);
  };
  check(DataType::U8, uint8_t{255});
  check(DataType::U16, uint16_t{65535});
  check(DataType::U32, uint32_t{3'999'999'999});
  check(DataType::U64, uint64_t{3'999'999'999});
}

// Whether the rows of a move lie in a buffer of so many elements.
bool LiesIn(const Move& move, const Strides& strides, int64_t elements) {
  if (move.rows() == 0 || move.inner == 0) return true;
  const int64_t last = strides.offset + (move.outer - 1) * strides.outer +
                       (move.middle - 1) * strides.middle + move.inner;
  return strides.offset >= 0 && strides.outer >= 0 && strides.middle >= 0 &&
         move.outer > 0 && move.middle > 0 && move.inner > 0 && last <= elements;
}

// Programs come from elsewhere: their parameters and shapes may be anything.
TEST(a_plan_that_is_not_refused_stays_inside_the_buffers) {
  std::mt19937_64 random(7);
  const auto pick = [&](const std::vector<int64_t>& from) {
    return from[random() % from.size()];
  };
  const std::vector<int64_t> counts = {0, 1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36};
  const std::vector<int64_t> values = {
      0, 1, 2, 3, 4, 6, -1, -2, 1 << 30, INT64_MAX, INT64_MIN, int64_t{1} << 62};
  for (const Collective* collective : kCollectives) {
    if (collective->plan_reads_operands_from >= 0) continue;
    int accepted = 0, refused = 0;
    for (int trial = 0; trial < 5000; ++trial) {
      const int size = static_cast<int>(random() % 4) + 1;
      std::vector<Leaf> operands, results;
      for (uint64_t i = random() % 3; i-- > 0;) {
        operands.push_back(FloatLeaf(pick(counts)));
        const int64_t same = operands.back().elements;
        results.push_back(FloatLeaf(pick({same, same * size, same / size, 5})));
      }
      std::vector<int64_t> params(random() % 7);
      for (int64_t& param : params) {
        // Mostly small, or next to none would be accepted.
        param = random() % 4 != 0 ? static_cast<int64_t>(random() % 3) : pick(values);
      }
      auto site = MakeSite(std::string(collective->name()), params, operands, results);
      auto made = site->MakePlan(size, nullptr);
      if (!made) {
        ++refused;
        continue;
      }
      const Plan& plan = *made;
      ++accepted;
      for (int leaf = 0; leaf < static_cast<int>(plan.leaves.size()); ++leaf) {
        plan.ForEachMove(leaf, Plan::kEveryRank, [&](const Move& move) {
          for (const Ranks& ranks : {move.sources, move.targets}) {
            for (int rank : ranks) CHECK_TRUE(rank >= 0 && rank < size);
          }
          CHECK_TRUE(move.sources.empty() ||
                     LiesIn(move, move.from, operands[leaf].elements));
          CHECK_TRUE(LiesIn(move, move.to, results[leaf].elements));
        });
      }
    }
    CHECK_TRUE(accepted >= 25 && refused >= 25);
  }
}

}  // namespace
}  // namespace jaxcomm::testing
