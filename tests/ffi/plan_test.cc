#include "ffi/plan.h"

#include <map>
#include <vector>

#include "ffi/handlers/collectives.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

// How often each element of each rank's result is written.
std::map<std::pair<int, int64_t>, int> Writes(const Plan& plan) {
  std::map<std::pair<int, int64_t>, int> writes;
  for (const Block& block : plan.blocks) {
    const Move& move = plan.moves[block.move];
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      const int64_t start = move.to.offset + row / move.middle * move.to.outer +
                            row % move.middle * move.to.middle;
      for (int64_t i = block.inner_begin; i < block.inner_end; ++i) {
        for (int target : move.targets) ++writes[{target, start + i}];
      }
    }
  }
  return writes;
}

TEST(every_element_of_every_result_is_written_once) {
  struct Case {
    const char* collective;
    std::vector<int64_t> params;
    int64_t operand, result;
  };
  constexpr int kSize = 3;
  const std::vector<Case> cases = {
      {"all_reduce", {}, 10, 10},         {"all_gather", {2}, 10, 30},
      {"reduce_scatter", {2}, 30, 10},    {"all_to_all", {2, 5, 1}, 60, 60},
      {"all_to_all", {2, 5, 0}, 60, 60},  {"permute", {1, -1, 0}, 10, 10},
      {"broadcast", {1}, 10, 10},         {"gather", {2, 5}, 10, 30},
      {"scatter", {0, 2}, 30, 10},        {"reduce", {1}, 10, 10},
      {"scan", {0, 0}, 10, 10},           {"scan", {1, 0}, 10, 10},
      {"scan", {1, 1}, 10, 10},           {"all_gather", {1}, 200000, 600000},
      {"all_reduce", {}, 200001, 200001},
  };
  for (const Case& test : cases) {
    auto site = MakeSite(test.collective, test.params, {FloatLeaf(test.operand)},
                         {FloatLeaf(test.result)});
    const Plan* plan = nullptr;
    CHECK_TRUE(site->GetPlan(kSize, &plan).success());
    const auto writes = Writes(*plan);
    CHECK_EQ(static_cast<int64_t>(writes.size()), kSize * test.result);
    bool once = true;
    for (const auto& [place, count] : writes) once = once && count == 1;
    CHECK_TRUE(once);
  }
}

TEST(a_permutation_of_the_wrong_size_is_refused) {
  auto site = MakeSite("permute", {0, 1}, {FloatLeaf(1)}, {FloatLeaf(1)});
  const Plan* plan = nullptr;
  CHECK_EQ(site->GetPlan(3, &plan).message(),
           "a permutation of 2 ranks was given to a group of 3");
}

TEST(signatures_tell_shapes_parameters_and_reductions_apart) {
  auto one = MakeSite("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)});
  auto same = MakeSite("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)});
  auto longer = MakeSite("all_reduce", {}, {FloatLeaf(5)}, {FloatLeaf(5)});
  auto product =
      MakeSite("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, ReduceOp::kProduct);
  CHECK_EQ(one->signature(), same->signature());
  CHECK_TRUE(one->signature() != longer->signature());
  CHECK_TRUE(one->signature() != product->signature());
  CHECK_TRUE(one->serial() != same->serial());
  CHECK_EQ(longer->ToString(), "all_reduce(float32[5])");
}

}  // namespace
}  // namespace jaxcomm::testing
