// Small sums by this package's own kernels, between devices of one process. The
// stand-in runs what the kernels' PTX says.
#include <atomic>
#include <chrono>
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
#include "tests/ffi/copies.h"
#include "tests/ffi/fake_library.h"
#include "tests/ffi/fake_nccl.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

#include "ffi/backends/host/small_float.h"

int64_t MostWords(int size) { return OneShotArguments::Capacity(size); }

std::shared_ptr<Communicator> MakeOneShot(
    int size, double timeout_seconds = 30,
    std::vector<std::vector<int64_t>> groups = {}) {
  setenv("JAXCOMM_FAKE_PTX", "1", 1);
  auto made = Make(size, timeout_seconds, Library(), std::move(groups), true);
  TheFake().clear_trace();
  return made;
}

std::unique_ptr<CallSite> SumSite(int64_t elements, ReduceOp op = ReduceOp::kSum) {
  return MakeSite("all_reduce", {}, {FloatLeaf(elements)}, {FloatLeaf(elements)}, op);
}

int64_t OneShotCalls(Communicator& communicator) {
  return communicator.stats().one_shot_calls;
}

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
  setenv("JAXCOMM_FAKE_PTX", "0", 1);
  for (const char* function : {"", "cuDeviceCanAccessPeer", "cuModuleGetFunction"}) {
    if (*function != '\0') {
      setenv("JAXCOMM_FAKE_PTX", "1", 1);
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
  auto communicator = MakeOneShot(4, 30, {{100, 103}, {102, 101}});
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

// Ranks may be one sum apart: nothing of the next is taken for this one, nor
// overwritten.
TEST(sums_in_a_row_keep_apart) {
  constexpr int kSize = 3, kSums = 2000;
  auto communicator = MakeOneShot(kSize);
  const auto large = SumSite(40), small = SumSite(1);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      Part many(rank, large.get()), one(rank, small.get());
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int sum = 0; sum < kSums; ++sum) {
        Part& chosen = sum % 3 == 0 ? many : one;
        chosen.operand.assign(chosen.operand.size(), static_cast<float>(sum + rank));
        const Call call = chosen.CallOf(sum);
        if (communicator->Enqueue(call, chosen.on.stream).failure()) ++wrong;
        if (random() % 7 == 0) std::this_thread::yield();
        chosen.on.Synchronize();
        for (float value : chosen.result) {
          wrong += value != static_cast<float>(kSize * sum + kSize);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(OneShotCalls(*communicator), kSums);
}

// The third would write where the first, which is late, is yet to be read.
TEST(sums_on_several_streams_keep_their_order) {
  auto communicator = MakeOneShot(2);
  const auto site = SumSite(2);
  OnDevice late(0), free(0), last(0);
  Gate gate;
  TheFake().cuda.LaunchHostFunc(late.stream, &Gate::Wait, &gate);
  std::vector<std::vector<float>> operands, results;
  for (int i = 0; i < 6; ++i) {
    operands.push_back({static_cast<float>(i), static_cast<float>(10 * i)});
    results.push_back({-1, -1});
  }
  const auto give = [&](int device, int sum, cuda::Stream stream) {
    const void* from[] = {operands[3 * device + sum].data()};
    void* to[] = {results[3 * device + sum].data()};
    const Call call{site.get(), sum, 1, 1, device, from, to, nullptr};
    CHECK_TRUE(communicator->Enqueue(call, stream).success());
  };
  give(0, 0, late.stream);
  give(0, 1, free.stream);
  give(0, 2, last.stream);
  {
    OnDevice peer(1);
    for (int sum = 0; sum < 3; ++sum) give(1, sum, peer.stream);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    CHECK_EQ(results[1][0], -1.0f);
    gate.open = true;
    peer.Synchronize();
  }
  for (const OnDevice* on : {&late, &free, &last}) on->Synchronize();
  for (int sum = 0; sum < 3; ++sum) {
    for (int device = 0; device < 2; ++device) {
      CHECK_EQ(results[3 * device + sum][0], static_cast<float>(2 * sum + 3));
      CHECK_EQ(results[3 * device + sum][1], static_cast<float>(20 * sum + 30));
    }
  }
}

TEST(halves_are_sums_too) {
  auto communicator = MakeOneShot(2);
  const auto site = SumSite(2);
  std::vector<std::unique_ptr<Part>> parts;
  ForAll(
      2, site.get(),
      [&](Part& part) {
        CHECK_TRUE(communicator->EnqueueStart(part.CallOf(), part.on.stream).success());
        CHECK_TRUE(communicator->EnqueueDone(part.CallOf(), part.on.stream).success());
      },
      &parts);
  CHECK_EQ(parts[0]->result[1], parts[0]->operand[1] + parts[1]->operand[1]);
  CHECK_EQ(OneShotCalls(*communicator), 1);
}

TEST(who_waits_in_vain_is_let_go_at_the_deadline) {
  auto communicator = MakeOneShot(2, /*timeout_seconds=*/0.2);
  const auto site = SumSite(300);
  Part alone(0, site.get());
  CHECK_TRUE(communicator->Enqueue(alone.CallOf(), alone.on.stream).success());
  alone.on.Synchronize();  // returns, or the test hangs
  const Status status = communicator->Enqueue(alone.CallOf(2), alone.on.stream);
  CHECK_CONTAINS(std::string(status.message()), "not done after 0.2 s");
  CHECK_CONTAINS(std::string(status.message()), "all_reduce(float32[300])");
  CHECK_TRUE(Comes([&] { return communicator->stats().in_flight == 0; }));
}

TEST(closing_lets_go_who_waits) {
  auto communicator = MakeOneShot(2);
  const auto site = SumSite(2);
  Part alone(0, site.get());
  CHECK_TRUE(communicator->Enqueue(alone.CallOf(), alone.on.stream).success());
  // The other will not come: it has been told of another error.
  std::thread closer(
      [&] { communicator->Abort(Status(ErrorCode::kCancelled, "closed")); });
  closer.join();
  alone.on.Synchronize();
  CHECK_TRUE(communicator->stats().in_flight == 0);
}

TEST(memory_stays_while_a_sum_is_yet_to_run) {
  auto communicator = MakeOneShot(2, /*timeout_seconds=*/0.2);
  const auto site = SumSite(300);
  Part late(0, site.get()), first(1, site.get());
  Gate gate;
  {
    OnDevice on(0);
    TheFake().cuda.LaunchHostFunc(late.on.stream, &Gate::Wait, &gate);
    CHECK_TRUE(communicator->Enqueue(late.CallOf(), late.on.stream).success());
  }
  // The deadline of the other ends the communicator.
  CHECK_TRUE(communicator->Enqueue(first.CallOf(), first.on.stream).success());
  first.on.Synchronize();
  TheFake().clear_trace();
  std::atomic<bool> is_freed{false};
  std::thread closer([&] {
    communicator->Abort(Status(ErrorCode::kCancelled, "closed"));
    communicator = nullptr;
    is_freed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK_TRUE(!is_freed);
  CHECK_EQ(Count("cuModuleUnload"), 0);
  gate.open = true;
  closer.join();
  CHECK_TRUE(Comes([] { return Count("cuModuleUnload") == 2; }));
  late.on.Synchronize();
}

TEST(all_memory_is_given_back) {
  const auto used = [] {
    OnDevice on(1);
    size_t free = 0, total = 0;
    TheFake().cuda.MemGetInfo(&free, &total);
    return static_cast<int64_t>(total - free);
  };
  const int64_t before = used();
  {
    auto plain = Make(2);
    const int64_t by_nccl = plain->stats().device_bytes;
    plain = nullptr;
    auto communicator = MakeOneShot(2);
    CHECK_EQ(communicator->stats().device_bytes - by_nccl,
             static_cast<int64_t>(2 * OneShotArguments::kInboxBytes));
  }
  CHECK_EQ(used(), before);
  for (const char* function : {"cuMemAllocHost_v2", "cuEventCreate"}) {
    setenv("JAXCOMM_FAKE_PTX", "1", 1);
    const std::vector<PeerMember> members = [] {
      std::vector<PeerMember> made;
      for (int rank = 0; rank < 2; ++rank) {
        cuda::Context context = nullptr;
        TheFake().cuda.DevicePrimaryCtxRetain(&context, rank);
        made.push_back({0, rank, 2, rank, context});
      }
      return made;
    }();
    OnDevice first(0), second(1);
    TheFake().fail(function, 0, 2);
    std::unique_ptr<OneShot> made;
    const Status status =
        OneShot::Create(Library(), members, {first.stream, second.stream}, &made);
    CHECK_TRUE(status.errc() == ErrorCode::kResourceExhausted);
    CHECK_TRUE(made == nullptr);
    for (int rank = 0; rank < 2; ++rank) {
      TheFake().cuda.DevicePrimaryCtxRelease(rank);
    }
  }
  CHECK_EQ(used(), before);
}

TEST(flags_are_not_used_again) {
  setenv("JAXCOMM_FAKE_PTX", "1", 1);
  std::vector<PeerMember> members;
  for (int rank = 0; rank < 2; ++rank) {
    cuda::Context context = nullptr;
    TheFake().cuda.DevicePrimaryCtxRetain(&context, rank);
    members.push_back({0, rank, 2, rank, context});
  }
  {
    OnDevice first(0), second(1);
    std::unique_ptr<OneShot> one_shot;
    CHECK_TRUE(OneShot::Create(Library(), members, {first.stream, second.stream},
                               &one_shot, /*flag=*/0xfffffff8)
                   .success());
    first.Synchronize();
    second.Synchronize();
    Steps steps;
    steps.grouped.resize(1);
    steps.grouped[0].kind = Step::Kind::kAllReduce;
    steps.grouped[0].type = nccl::Type::kInt32;
    steps.grouped[0].count = 1;
    int sums = 0;
    int32_t operand = 1, result[2] = {};
    for (; sums < 100 && one_shot->Takes(steps, 0); ++sums) {
      for (size_t rank = 0; rank < 2; ++rank) {
        CHECK_TRUE(one_shot->Takes(steps, rank));
        const void* operands[] = {&operand};
        void* results[] = {&result[rank]};
        const Call call{nullptr, 1, 1, 1, 0, operands, results, nullptr};
        OnDevice on(static_cast<int>(rank));
        CHECK_TRUE(
            one_shot
                ->Launch(steps, call, rank, rank == 0 ? first.stream : second.stream)
                .success());
      }
    }
    first.Synchronize();
    second.Synchronize();
    CHECK_EQ(result[0] + result[1], 4);
    CHECK_TRUE(sums > 0 && sums < 8);
  }
  for (int rank = 0; rank < 2; ++rank) TheFake().cuda.DevicePrimaryCtxRelease(rank);
}

}  // namespace
}  // namespace jaxcomm::testing
