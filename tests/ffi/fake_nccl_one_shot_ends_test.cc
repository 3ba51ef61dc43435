// Small sums by this package's own kernels: their order, what ends them, and what they
// hold.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/ffi/check.h"
#include "tests/ffi/one_shot.h"

namespace jaxcomm::testing {
namespace {

// Two ranks without a world.
struct Pair {
  Pair() {
    for (int rank = 0; rank < 2; ++rank) {
      cuda::Context context = nullptr;
      TheFake().cuda.DevicePrimaryCtxRetain(&context, rank);
      members.push_back({0, rank, 2, rank, context});
    }
  }
  ~Pair() {
    for (int rank = 0; rank < 2; ++rank) TheFake().cuda.DevicePrimaryCtxRelease(rank);
  }
  std::vector<RankFacts> members;
};

// Sums one 32-bit integer.
Steps OneSum() {
  Steps steps;
  steps.grouped.resize(1);
  steps.grouped[0].kind = Step::Kind::kAllReduce;
  steps.grouped[0].type = nccl::Type::kInt32;
  steps.grouped[0].count = 1;
  return steps;
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

TEST(split_phase_sums_are_sums_too) {
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

std::atomic<bool> tells{true};

TEST(closing_lets_go_who_waits) {
  setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
  static NcclLibrary library = Library();
  library.cuda.EventQuery = [](cuda::Event event) {
    return tells ? TheFake().cuda.EventQuery(event) : cuda::kNotReady;
  };
  // Closing waits for so long. No deadline passes meanwhile: it begins when the watch
  // hears that the sum runs.
  auto communicator = Make(2, 0.3, library, {}, /*one_shot=*/true);
  const auto site = SumSite(2);
  Part alone(0, site.get());
  tells = false;
  CHECK_TRUE(communicator->Enqueue(alone.CallOf(), alone.on.stream).success());
  // The other will not come: it has been told of another error.
  std::thread closer(
      [&] { communicator->Abort(Status(ErrorCode::kCancelled, "closed")); });
  closer.join();
  alone.on.Synchronize();
  CHECK_TRUE(communicator->stats().in_flight == 0);
  CHECK_CONTAINS(
      std::string(communicator->Enqueue(alone.CallOf(2), alone.on.stream).message()),
      "closed");
  tells = true;  // for who frees it
}

std::atomic<bool> stops_late{false}, is_freeing{false}, goes_on{false};

// A kernel that waits stays until the device is stopped. If it left without a sum, the
// program would read what is in memory.
TEST_ALONE(closing_lets_nobody_read_what_waits, EXIT_SUCCESS) {
  setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
  static NcclLibrary library = Library();
  library.cuda.LaunchKernel = [](cuda::Function function, unsigned a, unsigned b,
                                 unsigned c, unsigned d, unsigned e, unsigned f,
                                 unsigned g, cuda::Stream stream, void** parameters,
                                 void** extra) {
    if (stops_late) {
      // When the communicator frees what it has, with time for a kernel to leave.
      CHECK_TRUE(Comes([] { return is_freeing.load(); }));
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return TheFake().cuda.LaunchKernel(function, a, b, c, d, e, f, g, stream,
                                       parameters, extra);
  };
  library.cuda.MemFree = [](cuda::Pointer memory) {
    is_freeing = true;
    return TheFake().cuda.MemFree(memory);
  };
  auto communicator = Make(2, 0.3, library, {}, /*one_shot=*/true, OnFailure::kRaise);
  const auto site = SumSite(2);
  // Never freed: a kernel may still be reading when a stopped device gives an error.
  Part& alone = *new Part(0, site.get());
  CHECK_TRUE(communicator->Enqueue(alone.CallOf(), alone.on.stream).success());
  TheFake().cuda.LaunchHostFunc(
      alone.on.stream, [](void*) { goes_on = true; }, nullptr);
  is_freeing = false;
  stops_late = true;
  communicator->Abort(Status(ErrorCode::kCancelled, "closed"));
  communicator = nullptr;
  CHECK_EQ(alone.on.Synchronize(), static_cast<cuda::Result>(716));
  CHECK_TRUE(!goes_on);
}

TEST(a_small_sum_ends_with_one_that_shares_its_resources) {
  setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
  const nccl::UniqueId id = NewId();
  const NcclSettings settings{{{"splitShare", 1}}, ""};
  auto world =
      Must(NcclWorld::Create(Library(), 2, {{100, 0, 0}, {101, 1, 1}},
                             {id.internal, sizeof(id.internal)}, settings, {30}, {}));
  std::shared_ptr<Communicator> first, second;
  for (auto* each : {&first, &second}) {
    *each = Must(MakeNcclCommunicator(
        Spec({{100, 101}}, each == &first ? 0.2 : 30),
        {world, settings, {30}, {false, true}, OnFailure::kPoison}));
  }
  const auto site = SumSite(2);
  Part late(0, site.get()), beside(0, site.get());
  CHECK_TRUE(second->Enqueue(beside.CallOf(), beside.on.stream).success());
  CHECK_TRUE(first->Enqueue(late.CallOf(), late.on.stream).success());
  late.on.Synchronize();
  beside.on.Synchronize();  // returns, or the test hangs
  CHECK_TRUE(std::isnan(late.result[0]) && std::isnan(beside.result[0]));
}

// Whether a communicator that is closed keeps its memory until the gate is open.
void CheckFreedAfter(Gate* gate, std::shared_ptr<Communicator>* communicator) {
  TheFake().clear_trace();
  std::thread closer([&] {
    (*communicator)->Abort(Status(ErrorCode::kCancelled, "closed"));
    *communicator = nullptr;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK_EQ(Count("cuMemFree_v2"), 0);
  gate->open = true;
  closer.join();
  CHECK_TRUE(Comes([] { return Count("cuMemFree_v2") >= 4; }));
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
  CheckFreedAfter(&gate, &communicator);
  late.on.Synchronize();
}

TEST(memory_stays_while_what_was_given_before_a_failure_is_yet_to_run) {
  auto communicator = MakeOneShot(2);
  const auto site = MakeSite("all_reduce", {}, {FloatLeaf(2), FloatLeaf(2)},
                             {FloatLeaf(2), FloatLeaf(2)});
  OnDevice on(0);
  Gate gate;
  TheFake().cuda.LaunchHostFunc(on.stream, &Gate::Wait, &gate);
  TheFake().fail("cuLaunchKernel", 1, 2);
  float operands[4] = {}, results[4] = {};
  const void* from[] = {operands, operands + 2};
  void* to[] = {results, results + 2};
  const Call call{site.get(), 1, 1, 1, 0, from, to, nullptr};
  CHECK_CONTAINS(std::string(communicator->Enqueue(call, on.stream).message()),
                 "cuLaunchKernel");
  CheckFreedAfter(&gate, &communicator);
}

// In a process of its own: what other tests had may go while this one counts.
TEST_ALONE(all_memory_is_given_back, EXIT_SUCCESS) {
  const auto used = [] {
    OnDevice on(1);
    size_t free = 0, total = 0;
    TheFake().cuda.MemGetInfo(&free, &total);
    return static_cast<int64_t>(total - free);
  };
  // The first communicator makes what stops the devices, which stays.
  Make(2)->Abort(Status(ErrorCode::kCancelled, "closed"));
  const int64_t before = used();
  {
    auto plain = Make(2);
    const int64_t by_nccl = plain->stats().device_bytes;
    plain->Abort(Status(ErrorCode::kCancelled, "closed"));
    plain = nullptr;
    auto communicator = MakeOneShot(2);
    CHECK_EQ(communicator->stats().device_bytes - by_nccl,
             static_cast<int64_t>(2 * OneShotArguments::InboxBytes(2)));
    communicator->Abort(Status(ErrorCode::kCancelled, "closed"));
  }
  CHECK_EQ(used(), before);
  setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
  for (const char* function : {"cuMemAllocHost_v2", "cuMemAlloc_v2", "cuEventCreate"}) {
    const Pair pair;
    OnDevice first(0), second(1);
    TheFake().fail(function, 0, 2);
    auto result =
        OneShot::Create(Library(), pair.members, {first.stream, second.stream});
    if (std::string(function) == "cuMemAllocHost_v2") {
      CHECK_TRUE(result.status().errc() == ErrorCode::kResourceExhausted);
      continue;
    }
    // NCCL adds, on all ranks.
    const auto made = Must(std::move(result));
    CHECK_TRUE(!made->reason().empty());
    for (size_t rank = 0; rank < 2; ++rank) CHECK_TRUE(!made->takes_part(rank));
    first.Synchronize();
    second.Synchronize();
  }
  CHECK_EQ(used(), before);
}

TEST(what_a_communicator_holds_is_told_as_it_is_now) {
  static std::atomic<uint64_t> told{1000};
  static NcclLibrary library = Library();
  library.nccl.CommMemStats = [](nccl::Comm, nccl::MemStat, uint64_t* value) {
    *value = told;
    return nccl::kSuccess;
  };
  auto communicator = Make(2, 30, library);
  const int64_t before = communicator->stats().device_bytes;
  told += 500;  // connected to another peer
  CHECK_EQ(communicator->stats().device_bytes, before + 2 * 500);
}

TEST(flags_are_not_used_again) {
  setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
  const Pair pair;
  OnDevice first(0), second(1);
  const auto one_shot = Must(OneShot::Create(
      Library(), pair.members, {first.stream, second.stream}, /*flag=*/0xfffffff8));
  first.Synchronize();
  second.Synchronize();
  const Steps steps = OneSum();
  int sums = 0;
  int32_t operand = 1, result[2] = {};
  for (; sums < 100 && one_shot->sums_left(0) >= kMostSums; ++sums) {
    for (size_t rank = 0; rank < 2; ++rank) {
      CHECK_TRUE(one_shot->takes_part(rank));
      CHECK_TRUE(one_shot->sums_left(rank) >= kMostSums);
      const void* operands[] = {&operand};
      void* results[] = {&result[rank]};
      const Call call{nullptr, 1, 1, 1, 0, operands, results, nullptr};
      OnDevice on(static_cast<int>(rank));
      CHECK_TRUE(
          one_shot->Launch(steps, call, rank, rank == 0 ? first.stream : second.stream)
              .success());
    }
  }
  first.Synchronize();
  second.Synchronize();
  CHECK_EQ(result[0] + result[1], 4);
  CHECK_TRUE(sums > 0 && sums < 8);
}

}  // namespace
}  // namespace jaxcomm::testing
