// Small sums by this package's own kernels: what ends them, and what they hold.
#include <cmath>

#include "ffi/backends/nccl/engines/one_shot.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

const Status kClosed(ErrorCode::kCancelled, "closed");

std::atomic<bool> tells{true};

TEST_ALONE(closing_lets_go_who_waits, EXIT_SUCCESS) {
  NcclLibrary library = Library();
  library.cuda.EventQuery = [](cuda::Event event) {
    return tells ? Cuda().EventQuery(event) : cuda::kNotReady;
  };
  // Closing waits for so long. No timeout passes meanwhile: its time begins when the
  // watch hears that the sum runs.
  auto communicator = MakeOneShot(2, kExpires, library);
  const auto site = SumSite(2);
  Part alone(0, site.get());
  tells = false;
  CHECK_OK(alone.Enqueue(*communicator));
  // The other will not come: it has been told of another error.
  std::thread([&] { communicator->Abort(kClosed); }).join();
  alone.on.Synchronize();
  CHECK_TRUE(IsIdle(*communicator));
  CHECK_FAILS(alone.Enqueue(*communicator, 2), "closed");
  tells = true;  // for who frees it
}

std::atomic<bool> stops_late{false}, is_freeing{false}, goes_on{false};

// A kernel that waits stays until the device is stopped. If it left without a sum, the
// program would read what is in memory.
TEST_ALONE(closing_lets_nobody_read_what_waits, EXIT_SUCCESS) {
  NcclLibrary library = Library();
  library.cuda.LaunchKernel = [](cuda::Function function, unsigned a, unsigned b,
                                 unsigned c, unsigned d, unsigned e, unsigned f,
                                 unsigned g, cuda::Stream stream, void** parameters,
                                 void** extra) {
    if (stops_late) {
      // When the communicator frees what it has, with time for a kernel to leave.
      CHECK_TRUE(Until([] { return is_freeing.load(); }));
      LetOthersRun();
    }
    return Cuda().LaunchKernel(function, a, b, c, d, e, f, g, stream, parameters,
                               extra);
  };
  library.cuda.MemFree = [](cuda::Pointer memory) {
    is_freeing = true;
    return Cuda().MemFree(memory);
  };
  auto communicator = MakeOneShot(2, kExpires, library, OnFailure::kRaise);
  const auto site = SumSite(2);
  // Never freed: a kernel may still be reading when a stopped device gives an error.
  Part& alone = *new Part(0, site.get());
  CHECK_OK(alone.Enqueue(*communicator));
  Cuda().LaunchHostFunc(alone.on.stream, [](void*) { goes_on = true; }, nullptr);
  is_freeing = false;
  stops_late = true;
  communicator->Abort(kClosed);
  communicator = nullptr;
  CHECK_EQ(alone.on.Synchronize(), kStopped);
  CHECK_TRUE(!goes_on);
}

TEST_ALONE(a_small_sum_ends_with_one_that_shares_its_resources, EXIT_SUCCESS) {
  Options options;
  options.one_shot = true;
  options.settings = {{{"splitShare", 1}}, ""};
  const auto world = MakeWorld(2, Library(), options.settings);
  const auto second = Make(options, world);
  options.timeout = kExpires;
  const auto first = Make(options, world);
  const auto site = SumSite(2);
  Part late(0, site.get()), beside(0, site.get());
  CHECK_OK(beside.Enqueue(*second));
  CHECK_OK(late.Enqueue(*first));
  for (Part* part : {&late, &beside}) {
    part->on.Synchronize();  // returns, or the test hangs
    CHECK_TRUE(std::isnan(part->result[0]));
  }
}

// Whether a communicator that is closed keeps its memory until the gate is open.
void CheckFreedAfter(Gate* gate, std::shared_ptr<Communicator>* communicator) {
  TheFake().clear_trace();
  std::thread closer([&] {
    (*communicator)->Abort(kClosed);
    *communicator = nullptr;
  });
  for (int i = 0; i < 5; ++i) LetOthersRun();
  CHECK_EQ(Count("cuMemFree_v2"), 0);
  gate->Open();
  closer.join();
  CHECK_TRUE(Until([] { return Count("cuMemFree_v2") >= 4; }));
}

TEST_ALONE(memory_stays_while_a_sum_is_yet_to_run, EXIT_SUCCESS) {
  auto communicator = MakeOneShot(2, kExpires);
  const auto site = SumSite(300);
  Part late(0, site.get()), first(1, site.get());
  Gate gate;
  gate.Hold(late.on.stream);
  CHECK_OK(late.Enqueue(*communicator));
  // The timeout of the other ends the communicator.
  CHECK_OK(first.Enqueue(*communicator));
  first.on.Synchronize();
  CheckFreedAfter(&gate, &communicator);
}

TEST(memory_stays_while_what_was_given_before_a_failure_is_yet_to_run) {
  auto communicator = MakeOneShot();
  const auto site = MakeSite("all_reduce", {}, {FloatLeaf(2), FloatLeaf(2)},
                             {FloatLeaf(2), FloatLeaf(2)});
  OnDevice on(0);
  Gate gate;
  gate.Hold(on.stream);
  TheFake().fail("cuLaunchKernel", 1, 2);
  float operands[4] = {}, results[4] = {};
  const void* from[] = {operands, operands + 2};
  void* to[] = {results, results + 2};
  const Call call{site.get(), 1, 1, 1, 0, from, to, nullptr};
  CHECK_FAILS(communicator->Enqueue(call, on.stream), "cuLaunchKernel");
  CheckFreedAfter(&gate, &communicator);
}

// Of two sums the first waits for the other rank, which never comes.
TEST(a_launch_that_fails_leaves_no_kernel_waiting) {
  auto communicator = MakeOneShot();
  const auto site = MakeSite("all_reduce", {}, {FloatLeaf(2), FloatLeaf(2)},
                             {FloatLeaf(2), FloatLeaf(2)});
  OnDevice on(0);
  TheFake().fail("cuLaunchKernel", 1, 2);
  float operands[4] = {}, results[4] = {};
  const void* from[] = {operands, operands + 2};
  void* to[] = {results, results + 2};
  const Call call{site.get(), 1, 1, 1, 0, from, to, nullptr};
  CHECK_FAILS(communicator->Enqueue(call, on.stream), "cuLaunchKernel");
  CHECK_TRUE(Until([&] { return Cuda().StreamQuery(on.stream) == cuda::kSuccess; }));
  CHECK_TRUE(IsIdle(*communicator));
  CHECK_EQ(CountOf(*communicator, FlightRecorder::State::kFailed), 1);
}

// Two ranks without a world.
struct Pair {
  std::vector<RankFacts> members() const {
    return {{0, 0, 2, 0, first.context}, {0, 1, 2, 1, second.context}};
  }
  std::vector<cuda::Stream> streams() const { return {first.stream, second.stream}; }
  std::unique_ptr<PeerMemory> inboxes() const {
    return std::make_unique<PeerMemory>(Library(), members(), streams(), 64 << 20);
  }
  void Synchronize() const {
    first.Synchronize();
    second.Synchronize();
  }
  OnDevice first{0}, second{1};
};

// In a process of its own: what other tests had may go while this one counts.
TEST_ALONE(all_memory_is_given_back, EXIT_SUCCESS) {
  const auto used = [] {
    OnDevice on(1);
    size_t free = 0, total = 0;
    Cuda().MemGetInfo(&free, &total);
    return static_cast<int64_t>(total - free);
  };
  // The first communicator makes what stops the devices, which stays.
  Make()->Abort(kClosed);
  const int64_t before = used();
  MakeOneShot()->Abort(kClosed);
  CHECK_EQ(used(), before);
  for (const std::string function :
       {"cuMemAllocHost_v2", "cuMemAlloc_v2", "cuEventCreate", "cuDeviceCanAccessPeer",
        "cuModuleGetFunction"}) {
    const Pair pair;
    TheFake().fail(function.c_str(), 0, 2);
    auto result = OneShot::Create(pair.inboxes());
    if (function == "cuMemAllocHost_v2") {
      CHECK_TRUE(result.status().errc() == ErrorCode::kResourceExhausted);
      continue;
    }
    // NCCL adds, on all ranks.
    const auto made = Must(std::move(result));
    CHECK_TRUE(!made->reason().empty());
    for (size_t rank : {0, 1}) CHECK_TRUE(!made->takes_part(rank));
    pair.Synchronize();
  }
  CHECK_EQ(used(), before);
}

TEST(what_a_communicator_holds_is_told_as_it_is_now) {
  static std::atomic<uint64_t> told{1000};
  Options options;
  options.library.nccl.CommMemStats = [](nccl::Comm, nccl::MemStat, uint64_t* value) {
    *value = told;
    return nccl::kSuccess;
  };
  auto communicator = Make(options);
  const int64_t before = communicator->stats().device_bytes;
  told += 500;  // connected to another peer
  CHECK_EQ(communicator->stats().device_bytes, before + 2 * 500);
}

OneShotPlan SumOfOneInteger() {
  OneShotWork work;
  work.word = OneShotWord::kInt32;
  work.part = work.words = 1;
  OneShotPlan plan;
  plan.works = {work};
  return plan;
}

Status Launch(OneShot& one_shot, size_t rank, cuda::Stream stream, int32_t* operand,
              int32_t* result) {
  const void* operands[] = {operand};
  void* results[] = {result};
  const Call call{nullptr, 1, 1, 1, 0, operands, results, nullptr};
  const OnDevice on(static_cast<int>(rank));
  return one_shot.Launch(SumOfOneInteger(), call, rank, stream).status();
}

TEST(leaving_waits_for_a_sum_that_is_yet_to_run) {
  setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
  const Pair pair;
  const auto one_shot = Must(OneShot::Create(pair.inboxes()));
  pair.Synchronize();
  Gate gate;
  gate.Hold(pair.first.stream);
  int32_t operand = 1, result = 0;
  CHECK_OK(Launch(*one_shot, 0, pair.first.stream, &operand, &result));
  Event has_left;
  std::thread leaves([&] {
    one_shot->Leave();
    has_left.Set();
  });
  LetOthersRun();
  CHECK_TRUE(!has_left.is_set());
  gate.Open();
  CHECK_TRUE(has_left.Wait());
  leaves.join();
  pair.Synchronize();
}

TEST(flags_are_not_used_again) {
  setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
  const Pair pair;
  const auto one_shot = Must(OneShot::Create(pair.inboxes(), /*flag=*/0xfffffff8));
  pair.Synchronize();
  int sums = 0;
  int32_t operand = 1, result[2] = {};
  for (; sums < 100 && one_shot->works_left(0) >= kMostWorks; ++sums) {
    for (size_t rank : {0, 1}) {
      CHECK_TRUE(one_shot->takes_part(rank));
      CHECK_TRUE(one_shot->works_left(rank) >= kMostWorks);
      CHECK_OK(Launch(*one_shot, rank, pair.streams()[rank], &operand, &result[rank]));
    }
  }
  pair.Synchronize();
  CHECK_EQ(result[0] + result[1], 4);
  CHECK_TRUE(sums > 0 && sums < 8);
}

}  // namespace
}  // namespace jaxcomm::testing
