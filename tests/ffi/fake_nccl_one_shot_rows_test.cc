// Rows that this package's kernels exchange or gather, between devices of one process.
#include <algorithm>
#include <atomic>

#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

// One array of an exchange: see planners/all_to_all.cc.
struct Rows {
  int64_t outer, middle, inner;
  bool split_first;
  int64_t bytes = 2;  // of an element

  // Where element `i` of what `source` sends to `target` lies.
  int64_t At(bool is_operand, int place, int size, int64_t i) const {
    const int64_t k = i % inner, j = i / inner % middle, o = i / inner / middle;
    return is_operand == split_first ? ((o * size + place) * middle + j) * inner + k
                                     : ((o * middle + j) * size + place) * inner + k;
  }
  int64_t part() const { return outer * middle * inner; }
};

// The other ranks' rows come where they belong, in any number of chunks and arrays.
void TestRows(int size, const std::vector<Rows>& arrays, bool is_gather = false) {
  auto communicator = MakeOneShot(size);
  std::vector<int64_t> params;
  std::vector<Leaf> operands, results;
  for (const Rows& rows : arrays) {
    const auto leaf = [&](int64_t parts) {
      const int64_t elements = parts * rows.part();
      return Leaf{DataType::BF16, {elements}, elements, 2};
    };
    params.push_back(rows.outer);
    if (!is_gather) params.insert(params.end(), {rows.middle, rows.split_first});
    operands.push_back(leaf(is_gather ? 1 : size));
    results.push_back(leaf(size));
  }
  const auto site =
      MakeSite(is_gather ? "all_gather" : "all_to_all", params, operands, results);
  const auto value = [](int rank, size_t leaf, int64_t i) {
    return static_cast<uint16_t>(rank * 7919 + static_cast<int>(leaf) * 131 + i * 31);
  };
  std::atomic<int64_t> wrong{0};
  ForRanks(size, [&](int rank) {
    OnDevice on(rank);
    std::vector<std::vector<uint16_t>> from(arrays.size()), to(arrays.size());
    const void* given[4];
    void* taken[4];
    for (size_t leaf = 0; leaf < arrays.size(); ++leaf) {
      from[leaf].resize(static_cast<size_t>(operands[leaf].elements));
      to[leaf].assign(static_cast<size_t>(results[leaf].elements), 1);
      for (size_t i = 0; i < from[leaf].size(); ++i) {
        from[leaf][i] = value(rank, leaf, static_cast<int64_t>(i));
      }
      given[leaf] = from[leaf].data();
      taken[leaf] = to[leaf].data();
    }
    for (int run = 1; run <= 3; ++run) {
      for (auto& result : to) std::fill(result.begin(), result.end(), 1);
      const Call call{site.get(), run, 1, 1, rank, given, taken, nullptr};
      wrong += communicator->Enqueue(call, on.stream).failure();
      on.Synchronize();
      for (size_t leaf = 0; leaf < arrays.size(); ++leaf) {
        for (int source = 0; source < size; ++source) {
          for (int64_t i = 0; i < arrays[leaf].part(); ++i) {
            const int64_t sent = is_gather ? i : arrays[leaf].At(true, rank, size, i);
            const int64_t got = arrays[leaf].At(false, source, size, i);
            wrong += to[leaf][static_cast<size_t>(got)] != value(source, leaf, sent);
          }
        }
      }
    }
  });
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(NcclStatsOf(*communicator).one_shot_calls, 3);
}

TEST(rows_of_an_exchange_come_where_they_belong) {
  for (const bool split_first : {false, true}) {
    TestRows(2, {{1, 96, 1024, split_first}, {3, 5, 64, split_first}});
    TestRows(3, {{2, 40, 1600, split_first}, {1, 8, 8, !split_first}});
    // Of several chunks: an even number, and then an odd one.
    TestRows(4, {{2, 300, 1000, split_first}, {1, 1, 131072, split_first}});
    TestRows(4, {{1, 700, 2000, split_first}});
    TestRows(8, {{1, 17, 512, split_first},
                 {1, 9, 512, split_first},
                 {1, 3, 8, split_first},
                 {5, 3, 8, !split_first}});
  }
}

TEST(what_is_gathered_in_chunks_comes_where_it_belongs) {
  TestRows(2, {{1, 1, 3 << 20, true}, {1, 1, 1 << 16, true}}, true);
  TestRows(4, {{1, 1, 1 << 20, true}}, true);
  TestRows(3, {{7, 1, 9992, true}}, true);
}

}  // namespace
}  // namespace jaxcomm::testing
