// Small sums by this package's own kernels, between devices of one process. The
// stand-in runs the kernels on the host.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "ffi/backends/nccl/engines/one_shot.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

#include "ffi/backends/host/reduce/small_float.h"

// The most words of a sum by lines, and of one that is staged.
int64_t MostWords(int size) { return kMostLineBytesOfSum / 4 / (size - 1); }
constexpr int64_t kMostStaged = kMostStagedBytes / 4;
int64_t LeastStaged(int size) { return (MostWords(size) / 4 + 1) * 4; }

// One leaf on one rank, of any type.
struct Buffers {
  std::vector<char> operand, result;
};

template <typename T>
T Element(const std::vector<char>& buffer, int64_t i) {
  T value;
  std::memcpy(&value, buffer.data() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

struct Tried {
  std::vector<Buffers> ranks;
  int64_t one_shot = 0, all_reduce = 0;
};

// Sums random bits, made numbers by `fill`.
template <typename T, typename Fill>
Tried Try(Communicator& communicator, DataType dtype, int64_t elements,
          const Fill& fill, ReduceOp op = ReduceOp::kSum) {
  const Leaf leaf{dtype, {elements}, elements, sizeof(T)};
  const auto site = MakeSite("all_reduce", {}, {leaf}, {leaf}, op);
  const auto size = static_cast<int>(communicator.spec().groups[0].size());
  Tried tried;
  tried.ranks.resize(static_cast<size_t>(size));
  const int64_t before = NcclStatsOf(communicator).one_shot_calls;
  TheFake().clear_trace();
  ForRanks(size, [&](int rank) {
    OnDevice on(rank);
    Buffers& own = tried.ranks[rank];
    std::mt19937 random(static_cast<unsigned>(rank + 1));
    for (int64_t i = 0; i < elements; ++i) {
      const T value = fill(random);
      const char* const bytes = reinterpret_cast<const char*>(&value);
      own.operand.insert(own.operand.end(), bytes, bytes + sizeof(T));
    }
    own.result.assign(own.operand.size(), 1);
    const void* operands[] = {own.operand.data()};
    void* results[] = {own.result.data()};
    const Call call{site.get(), 1, 1, 1, rank, operands, results, nullptr};
    CHECK_OK(communicator.Enqueue(call, on.stream));
    on.Synchronize();
  });
  tried.one_shot = NcclStatsOf(communicator).one_shot_calls - before;
  tried.all_reduce = Count("ncclAllReduce");
  return tried;
}

float Normal(std::mt19937& random) {
  return std::normal_distribution<float>(0, 100)(random);
}
uint16_t Half(std::mt19937& random) { return static_cast<uint16_t>(random()); }

// Neighbours, then their sums; the last one, without a neighbour, goes up as it is.
float Tree(std::vector<float> terms) {
  while (terms.size() > 1) {
    std::vector<float> sums;
    for (size_t i = 0; i < terms.size(); i += 2) {
      sums.push_back(i + 1 < terms.size() ? terms[i] + terms[i + 1] : terms[i]);
    }
    terms = sums;
  }
  return terms[0];
}

TEST(float32_is_added_by_the_tree_over_the_ranks_and_a_mean_multiplies_before) {
  for (int size = 2; size <= OneShotArguments::kMostRanks; ++size) {
    auto communicator = MakeOneShot(size);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean}) {
      // The last of by lines, and the first that is staged.
      std::vector<int64_t> sizes = {1, 257, MostWords(size), LeastStaged(size)};
      if (size == 2) sizes.push_back(kMostStaged);
      for (int64_t elements : sizes) {
        const Tried tried =
            Try<float>(*communicator, DataType::F32, elements, Normal, op);
        CHECK_EQ(tried.one_shot, 1);
        CHECK_EQ(tried.all_reduce, 0);
        const float factor =
            op == ReduceOp::kMean ? 1 / static_cast<float>(size) : 1.0f;
        int wrong = 0;
        for (int64_t i = 0; i < elements; ++i) {
          std::vector<float> terms;
          for (const Buffers& rank : tried.ranks) {
            terms.push_back(Element<float>(rank.operand, i) * factor);
          }
          const float sum = Tree(terms);
          for (const Buffers& rank : tried.ranks) {
            wrong += Element<float>(rank.result, i) != sum;
          }
        }
        CHECK_EQ(wrong, 0);
      }
    }
  }
}

// All kinds of numbers are among random bits: infinities, NaN, the smallest.
template <typename Float>
void TestNarrow(DataType dtype) {
  auto communicator = MakeOneShot(7);
  for (const int64_t elements : {int64_t{20000}, 2 * LeastStaged(7)}) {
    const Tried tried = Try<uint16_t>(*communicator, dtype, elements, Half);
    CHECK_EQ(tried.one_shot, 1);
    int wrong = 0;
    for (int64_t i = 0; i < elements; ++i) {
      std::vector<float> terms;
      for (const Buffers& rank : tried.ranks) {
        terms.push_back(Widen(Float{Element<uint16_t>(rank.operand, i)}));
      }
      const float sum = Tree(terms);
      Float rounded;
      Narrow(sum, &rounded);
      for (const Buffers& rank : tried.ranks) {
        const auto bits = Element<uint16_t>(rank.result, i);
        wrong +=
            std::isnan(sum) ? !std::isnan(Widen(Float{bits})) : bits != rounded.bits;
      }
    }
    CHECK_EQ(wrong, 0);
  }
}

TEST(narrow_floats_are_rounded_once) {
  TestNarrow<BFloat16>(DataType::BF16);
  TestNarrow<Float16>(DataType::F16);
}

TEST(the_rest_is_left_to_nccl) {
  auto communicator = MakeOneShot(2);
  const auto by_nccl = [&](const Tried& tried) {
    CHECK_EQ(tried.one_shot, 0);
    CHECK_EQ(tried.all_reduce, 2);
  };
  by_nccl(Try<float>(*communicator, DataType::F32, kMostStaged + 4, Normal));
  // Of no whole quads.
  by_nccl(Try<float>(*communicator, DataType::F32, LeastStaged(2) + 1, Normal));
  by_nccl(Try<float>(*communicator, DataType::F32, 4, Normal, ReduceOp::kMax));
  by_nccl(Try<float>(*communicator, DataType::F32, 4, Normal, ReduceOp::kProduct));
  by_nccl(Try<double>(*communicator, DataType::F64, 4, Normal));
  // Half a word is left over.
  by_nccl(Try<uint16_t>(*communicator, DataType::BF16, 3, Half));
  by_nccl(Try<uint16_t>(*communicator, DataType::F16, 2 * kMostStaged + 2, Half));

  const auto site = SumSite(4);
  TheFake().clear_trace();
  ForParts(2, site.get(), [&](Part& part) {
    Call call = part.CallOf();
    call.may_be_captured = true;
    CHECK_OK(communicator->Enqueue(call, part.on.stream));
  });
  CHECK_EQ(Count("ncclAllReduce"), 2);
}

TEST(several_leaves_go_together_and_in_place) {
  auto communicator = MakeOneShot(2);
  const auto site = MakeSite("all_reduce", {}, {FloatLeaf(300), FloatLeaf(1)},
                             {FloatLeaf(300), FloatLeaf(1)});
  ForRanks(2, [&](int rank) {
    OnDevice on(rank);
    std::vector<float> first(300, static_cast<float>(rank + 1));
    float second = static_cast<float>(10 * (rank + 1));
    void* buffers[] = {first.data(), &second};
    const Call call{site.get(), 1, 1, 1, rank, buffers, buffers, nullptr};
    CHECK_OK(communicator->Enqueue(call, on.stream));
    on.Synchronize();
    CHECK_TRUE(first == std::vector<float>(300, 3));
    CHECK_EQ(second, 30.0f);
  });
  CHECK_EQ(NcclStatsOf(*communicator).one_shot_calls, 1);
}

// What a rank's result is to hold: from which rank and where in its operand, or the
// sum.
struct Kind {
  const char* collective;
  std::vector<int64_t> params;
  int64_t operand, result;  // parts
};

std::vector<Kind> KindsOf(int size) {
  std::vector<int64_t> ring;
  for (int rank = 0; rank < size; ++rank) ring.push_back((rank + size - 1) % size);
  return {{"all_reduce", {}, 1, 1},
          {"reduce_scatter", {1}, size, 1},
          {"all_gather", {1}, 1, size},
          {"all_to_all", {1, 1, 1}, size, size},
          {"permute", ring, 1, 1}};
}

// Small integers: any order of additions gives the same.
float ValueOf(int rank, int64_t i, int64_t run) {
  return static_cast<float>((rank * 31 + i * 7 + run * 13) % 1021);
}

float Wanted(const Kind& kind, int rank, int size, int64_t part, int64_t i,
             int64_t run) {
  const std::string collective = kind.collective;
  if (collective == "permute") {
    return ValueOf(static_cast<int>(kind.params[static_cast<size_t>(rank)]), i, run);
  }
  if (collective == "all_gather") {
    return ValueOf(static_cast<int>(i / part), i % part, run);
  }
  if (collective == "all_to_all") {
    return ValueOf(static_cast<int>(i / part), rank * part + i % part, run);
  }
  float sum = 0;
  for (int source = 0; source < size; ++source) {
    sum += ValueOf(source, (kind.operand > 1 ? rank * part : 0) + i, run);
  }
  return sum;
}

// All kinds, by lines and staged, in a row: ranks may be one work apart, and nothing of
// the next is taken for this one, nor overwritten.
void TestKinds(int size, const std::vector<int64_t>& parts, int runs) {
  auto communicator = MakeOneShot(size);
  struct Case {
    Kind kind;
    int64_t part;
    std::unique_ptr<CallSite> site;
  };
  std::vector<Case> cases;
  for (const int64_t part : parts) {
    for (const Kind& kind : KindsOf(size)) {
      cases.push_back({kind, part,
                       FloatSite(kind.collective, kind.params, kind.operand * part,
                                 kind.result * part)});
    }
  }
  std::mt19937 random(1);
  std::shuffle(cases.begin(), cases.end(), random);
  std::atomic<int> wrong{0};
  ForRanks(size, [&](int rank) {
    OnDevice on(rank);
    std::mt19937 own(static_cast<unsigned>(rank));
    std::vector<std::vector<float>> operands(cases.size()), results(cases.size());
    for (int run = 1; run <= runs; ++run) {
      for (size_t c = 0; c < cases.size(); ++c) {
        const Case& each = cases[c];
        // Lines need no alignment.
        const size_t shift = each.part < 100 ? (c + run + rank) % 2 : 0;
        operands[c].resize(shift + static_cast<size_t>(each.kind.operand * each.part));
        results[c].assign(shift + static_cast<size_t>(each.kind.result * each.part),
                          -1);
        for (size_t i = shift; i < operands[c].size(); ++i) {
          operands[c][i] = ValueOf(rank, static_cast<int64_t>(i - shift), run);
        }
        const void* from[] = {operands[c].data() + shift};
        void* to[] = {results[c].data() + shift};
        const Call call{each.site.get(), run, 1, 1, rank, from, to, nullptr};
        wrong += communicator->Enqueue(call, on.stream).failure();
        if (own() % 5 == 0) on.Synchronize();
      }
      on.Synchronize();
      for (size_t c = 0; c < cases.size(); ++c) {
        const Case& each = cases[c];
        const size_t shift = each.part < 100 ? (c + run + rank) % 2 : 0;
        for (size_t i = shift; i < results[c].size(); ++i) {
          wrong += results[c][i] != Wanted(each.kind, rank, size, each.part,
                                           static_cast<int64_t>(i - shift), run);
        }
        if (shift > 0) wrong += results[c][0] != -1;
      }
    }
  });
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(NcclStatsOf(*communicator).one_shot_calls,
           runs * static_cast<int64_t>(cases.size()));
}

TEST(all_kinds_are_right_by_lines) {
  TestKinds(2, {1, 70}, 20);
  TestKinds(5, {1, 70}, 10);
}
TEST(all_kinds_are_right_between_lines_and_staged) {
  const int64_t most = kMostLineBytes / 4;
  TestKinds(2, {3, most, most + 4, LeastStaged(2)}, 2);
  TestKinds(4, {3, most / 12 * 4 + 4, LeastStaged(4)}, 2);
  TestKinds(8, {most / 28 * 4 + 4}, 1);
}

TEST(boxes_have_room_for_every_work) {
  for (int size = 2; size <= OneShotArguments::kMostRanks; ++size) {
    for (const Kind& kind : KindsOf(size)) {
      for (int64_t part = 4; part <= kMostStagedBytes / 4; part += part / 16 + 3) {
        const auto site = FloatSite(kind.collective, kind.params, kind.operand * part,
                                    kind.result * part);
        const Plan plan = Must(site->MakePlan(size, nullptr));
        const Steps steps = Must(MakeSteps(*site, plan, 0, Natives::kOf228));
        for (const OneShotWork& work : MakeOneShotPlan(*site, plan, steps).works) {
          const bool is_hop = work.target != OneShotArguments::kAll;
          const uint32_t room = work.is_staged
                                    ? OneShotMemory::Staged(is_hop ? 1 : size)
                                    : OneShotMemory::Lines(size);
          CHECK_TRUE(work.part <= room);
        }
      }
    }
  }
}

TEST(hops_in_which_a_rank_has_no_part_are_left_to_nccl) {
  auto communicator = MakeOneShot(3);
  for (const std::vector<int64_t>& sources :
       {std::vector<int64_t>{-1, 0, 1}, {0, 2, 1}, {1, 1, 0}}) {
    const auto site = FloatSite("permute", sources, 8);
    TheFake().clear_trace();
    EnqueueAll(*communicator, 3, site.get());
    CHECK_TRUE(Count("ncclSend") > 0);
  }
  CHECK_EQ(NcclStatsOf(*communicator).one_shot_calls, 0);
}

}  // namespace
}  // namespace jaxcomm::testing
