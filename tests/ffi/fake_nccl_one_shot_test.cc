// Small sums by this package's own kernels, between devices of one process. The
// stand-in runs the kernels on the host.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "ffi/backends/nccl/engines/one_shot.h"
#include "ffi/backends/nccl/kernels/device_kernels.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

#include "ffi/backends/host/reduce/small_float.h"

std::shared_ptr<const DeviceKernels> Load(const OnDevice& on) {
  return Must(DeviceKernels::Load(Library(), on.context));
}

TEST(users_of_a_context_share_the_kernels) {
  const OnDevice zero(0), one(1);
  TheFake().clear_trace();
  auto first = Load(zero), second = Load(zero), other = Load(one);
  CHECK_TRUE(first == second);
  CHECK_TRUE(first != other);
  CHECK_EQ(Count("cuModuleLoadData"), 2);
  first = nullptr;
  CHECK_EQ(Count("cuModuleUnload"), 0);
  second = nullptr;
  CHECK_EQ(Count("cuModuleUnload"), 1);
}

TEST(poison_fills_any_length_at_any_address_after_a_failure_only) {
  const OnDevice zero(0);
  const auto kernels = Load(zero);
  uint32_t word = 0;
  PoisonArguments arguments;
  arguments.word = reinterpret_cast<uint64_t>(&word);
  arguments.count = PoisonArguments::kMostPoisoned;
  std::vector<uint8_t> memory(1 << 17, 5), wanted = memory;
  size_t at = 0, given = 0;
  for (size_t offset = 0; offset < 16; ++offset) {
    for (size_t bytes = 0; bytes < 40; ++bytes) {
      at = (at / 16 + 2) * 16 + offset;
      arguments.results[given++] = {reinterpret_cast<uint64_t>(memory.data() + at),
                                    bytes};
      std::fill_n(wanted.begin() + static_cast<ptrdiff_t>(at), bytes, 0xff);
      at += bytes;
      if (given < arguments.count) continue;
      word = 0;
      CHECK_OK(kernels->Poison(arguments, zero.stream));
      zero.Synchronize();
      CHECK_EQ(memory[at - 1], 5);
      word = 0x80000000;  // any but 0
      CHECK_OK(kernels->Poison(arguments, zero.stream));
      zero.Synchronize();
      given = 0;
    }
  }
  CHECK_EQ(given, size_t{0});
  CHECK_TRUE(memory == wanted);
}

int64_t MostWords(int size) { return OneShotArguments::Capacity(size); }

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
      for (int64_t elements : {int64_t{1}, int64_t{257}, MostWords(size)}) {
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
  const int64_t elements = 20000;
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
      wrong += std::isnan(sum) ? !std::isnan(Widen(Float{bits})) : bits != rounded.bits;
    }
  }
  CHECK_EQ(wrong, 0);
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
  by_nccl(Try<float>(*communicator, DataType::F32, MostWords(2) + 1, Normal));
  by_nccl(Try<float>(*communicator, DataType::F32, 4, Normal, ReduceOp::kMax));
  by_nccl(Try<float>(*communicator, DataType::F32, 4, Normal, ReduceOp::kProduct));
  by_nccl(Try<double>(*communicator, DataType::F64, 4, Normal));
  // Half a word is left over.
  by_nccl(Try<uint16_t>(*communicator, DataType::BF16, 3, Half));
  by_nccl(Try<uint16_t>(*communicator, DataType::F16, 2 * MostWords(2) + 2, Half));

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

}  // namespace
}  // namespace jaxcomm::testing
