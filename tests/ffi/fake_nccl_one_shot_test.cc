// Small sums by this package's own kernels, between devices of one process. The
// stand-in runs the kernels on the host.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"
#include "ffi/backends/nccl/one_shot.h"
#include "tests/ffi/check.h"
#include "tests/ffi/fake_library.h"
#include "tests/ffi/fake_nccl.h"
#include "tests/ffi/one_shot.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

#include "ffi/backends/host/small_float.h"

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
Tried Try(Communicator& communicator, int size, DataType dtype, int64_t elements,
          const Fill& fill, ReduceOp op = ReduceOp::kSum) {
  const Leaf leaf{dtype, {elements}, elements, sizeof(T)};
  const auto site = MakeSite("all_reduce", {}, {leaf}, {leaf}, op);
  Tried tried;
  tried.ranks.resize(static_cast<size_t>(size));
  const int64_t before = OneShotCalls(communicator);
  TheFake().clear_trace();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
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
      CHECK_TRUE(communicator.Enqueue(call, on.stream).success());
      on.Synchronize();
    });
  }
  for (std::thread& thread : threads) thread.join();
  tried.one_shot = OneShotCalls(communicator) - before;
  tried.all_reduce = Count("ncclAllReduce");
  return tried;
}

float Normal(std::mt19937& random) {
  return std::normal_distribution<float>(0, 100)(random);
}

TEST(float32_is_added_in_the_order_of_the_ranks) {
  for (int size : {2, 3, 8}) {
    auto communicator = MakeOneShot(size);
    for (int64_t elements : {int64_t{1}, int64_t{255}, int64_t{257}, MostWords(size)}) {
      const Tried tried =
          Try<float>(*communicator, size, DataType::F32, elements, Normal);
      CHECK_EQ(tried.one_shot, 1);
      CHECK_EQ(tried.all_reduce, 0);
      int wrong = 0;
      for (int64_t i = 0; i < elements; ++i) {
        float sum = 0;
        for (const Buffers& rank : tried.ranks) {
          sum = &rank == tried.ranks.data() ? Element<float>(rank.operand, i)
                                            : sum + Element<float>(rank.operand, i);
        }
        for (const Buffers& rank : tried.ranks) {
          wrong += Element<float>(rank.result, i) != sum;
        }
      }
      CHECK_EQ(wrong, 0);
    }
  }
}

TEST(a_mean_multiplies_before_it_adds) {
  auto communicator = MakeOneShot(3);
  const Tried tried =
      Try<float>(*communicator, 3, DataType::F32, 5, Normal, ReduceOp::kMean);
  CHECK_EQ(tried.one_shot, 1);
  for (int64_t i = 0; i < 5; ++i) {
    float sum = 0;
    for (const Buffers& rank : tried.ranks) {
      sum += Element<float>(rank.operand, i) * (1 / 3.0f);
    }
    CHECK_EQ(Element<float>(tried.ranks[2].result, i), sum);
  }
}

TEST(integers_wrap) {
  auto communicator = MakeOneShot(3);
  for (DataType dtype : {DataType::S32, DataType::U32}) {
    const Tried tried = Try<uint32_t>(*communicator, 3, dtype, 33,
                                      [](std::mt19937& random) { return random(); });
    CHECK_EQ(tried.one_shot, 1);
    for (int64_t i = 0; i < 33; ++i) {
      uint32_t sum = 0;
      for (const Buffers& rank : tried.ranks) sum += Element<uint32_t>(rank.operand, i);
      CHECK_EQ(Element<uint32_t>(tried.ranks[1].result, i), sum);
    }
  }
}

// All kinds of numbers are among random bits: infinities, NaN, the smallest.
template <typename Float>
void TestNarrow(DataType dtype) {
  for (int size : {2, 5}) {
    auto communicator = MakeOneShot(size);
    const int64_t elements = 20000;
    const Tried tried = Try<uint16_t>(
        *communicator, size, dtype, elements,
        [](std::mt19937& random) { return static_cast<uint16_t>(random()); });
    CHECK_EQ(tried.one_shot, 1);
    int wrong = 0;
    for (int64_t i = 0; i < elements; ++i) {
      float sum = 0;
      for (const Buffers& rank : tried.ranks) {
        const float value = Widen(Float{Element<uint16_t>(rank.operand, i)});
        sum = &rank == tried.ranks.data() ? value : sum + value;
      }
      Float rounded;
      Narrow(sum, &rounded);
      for (const Buffers& rank : tried.ranks) {
        const float found = Widen(Float{Element<uint16_t>(rank.result, i)});
        wrong += std::isnan(sum) ? !std::isnan(found)
                                 : Element<uint16_t>(rank.result, i) != rounded.bits;
      }
    }
    CHECK_EQ(wrong, 0);
  }
}

TEST(bfloat16_is_rounded_once) { TestNarrow<BFloat16>(DataType::BF16); }
TEST(float16_is_rounded_once) { TestNarrow<Float16>(DataType::F16); }

TEST(the_rest_is_left_to_nccl) {
  auto communicator = MakeOneShot(2);
  const auto by_nccl = [&](const Tried& tried) {
    CHECK_EQ(tried.one_shot, 0);
    CHECK_EQ(tried.all_reduce, 2);
  };
  by_nccl(Try<float>(*communicator, 2, DataType::F32, MostWords(2) + 1, Normal));
  by_nccl(Try<float>(*communicator, 2, DataType::F32, 4, Normal, ReduceOp::kMax));
  by_nccl(Try<float>(*communicator, 2, DataType::F32, 4, Normal, ReduceOp::kProduct));
  by_nccl(Try<double>(*communicator, 2, DataType::F64, 4, Normal));
  by_nccl(Try<int8_t>(*communicator, 2, DataType::S8, 4,
                      [](std::mt19937&) { return int8_t{3}; }));
  // Half a word is left over.
  by_nccl(Try<uint16_t>(*communicator, 2, DataType::BF16, 3,
                        [](std::mt19937&) { return uint16_t{0x3f80}; }));
  by_nccl(Try<uint16_t>(*communicator, 2, DataType::F16, 2 * MostWords(2) + 2,
                        [](std::mt19937&) { return uint16_t{0x3c00}; }));
}

TEST(recorded_programs_are_left_to_nccl) {
  auto communicator = MakeOneShot(2);
  const auto site = SumSite(4);
  ForAll(2, site.get(), [&](Part& part) {
    Call call = part.CallOf();
    call.may_be_captured = true;
    CHECK_TRUE(communicator->Enqueue(call, part.on.stream).success());
  });
  CHECK_EQ(Count("ncclAllReduce"), 2);
}

TEST(nccl_adds_where_the_driver_refuses_the_kernels) {
  setenv("JAXCOMM_FAKE_KERNELS", "0", 1);
  for (const char* function : {"", "cuDeviceCanAccessPeer", "cuModuleGetFunction"}) {
    if (*function != '\0') {
      setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
      TheFake().fail(function, 0, 801);
    }
    auto communicator = Make(2, 30, Library(), {}, /*one_shot=*/true);
    const Tried tried = Try<float>(*communicator, 2, DataType::F32, 4, Normal);
    CHECK_EQ(tried.one_shot, 0);
    CHECK_EQ(tried.all_reduce, 2);
  }
  const std::string trace = TheFake().trace();
  CHECK_TRUE(trace.find("violation") == std::string::npos);
}

TEST(groups_add_by_themselves) {
  auto communicator = MakeOneShot(4, 30, {{100, 103}, {102, 101}}, OnFailure::kRaise);
  const auto site = SumSite(3);
  std::vector<std::unique_ptr<Part>> parts;
  ForAll(
      4, site.get(),
      [&](Part& part) {
        CHECK_TRUE(communicator->Enqueue(part.CallOf(), part.on.stream).success());
      },
      &parts);
  for (int rank = 0; rank < 4; ++rank) {
    for (int i = 0; i < 3; ++i) {
      CHECK_EQ(parts[rank]->result[i],
               parts[rank]->operand[i] + parts[3 - rank]->operand[i]);
    }
  }
  CHECK_EQ(Count("cuLaunchKernel"), 4);
}

TEST(several_leaves_go_together_and_in_place) {
  auto communicator = MakeOneShot(2);
  const auto site = MakeSite("all_reduce", {}, {FloatLeaf(300), FloatLeaf(1)},
                             {FloatLeaf(300), FloatLeaf(1)});
  std::vector<std::vector<float>> first(2), second(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    first[rank].assign(300, static_cast<float>(rank + 1));
    second[rank].assign(1, static_cast<float>(10 * (rank + 1)));
    threads.emplace_back([&, rank] {
      OnDevice on(rank);
      void* buffers[] = {first[rank].data(), second[rank].data()};
      const Call call{site.get(), 1, 1, 1, rank, buffers, buffers, nullptr};
      CHECK_TRUE(communicator->Enqueue(call, on.stream).success());
      on.Synchronize();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_TRUE(first[rank] == std::vector<float>(300, 3));
    CHECK_EQ(second[rank][0], 30.0f);
  }
  CHECK_EQ(OneShotCalls(*communicator), 1);
}

}  // namespace
}  // namespace jaxcomm::testing
