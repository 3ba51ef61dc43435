// Calls by this package's own kernels in a row: how far a rank may be ahead of another,
// and what one that comes late takes.
#include <unistd.h>

#include <cmath>
#include <random>

#include "ffi/backends/nccl/kernels/device_kernels.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

// Ranks may be one sum apart: nothing of the next is taken for this one, nor
// overwritten. Split-phase sums are sums too.
TEST(sums_in_a_row_keep_apart) {
  constexpr int kSize = 3, kSums = 1000;
  auto communicator = MakeOneShot(kSize);
  const auto large = SumSite(40), small = SumSite(1);
  std::atomic<int> wrong{0};
  ForRanks(kSize, [&](int rank) {
    Part many(rank, large.get()), one(rank, small.get());
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int sum = 0; sum < kSums; ++sum) {
      Part& chosen = sum % 3 == 0 ? many : one;
      chosen.operand.assign(chosen.operand.size(), static_cast<float>(sum + rank));
      if (sum % 5 == 0) {
        wrong += chosen.Start(*communicator, sum).failure();
        wrong += chosen.Done(*communicator, sum).failure();
      } else {
        wrong += chosen.Enqueue(*communicator, sum).failure();
      }
      if (random() % 7 == 0) std::this_thread::yield();
      chosen.on.Synchronize();
      for (float value : chosen.result) {
        wrong += value != static_cast<float>(kSize * sum + kSize);
      }
    }
  });
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(NcclStatsOf(*communicator).one_shot_calls, kSums);
}

// The third would write where the first, which is late, is yet to be read.
TEST(sums_on_several_streams_keep_their_order) {
  auto communicator = MakeOneShot();
  const auto site = SumSite(2);
  Part late(0, site.get()), free(0, site.get()), last(0, site.get());
  Part peers[] = {{1, site.get()}, {1, site.get()}, {1, site.get()}};
  Part* const own[] = {&late, &free, &last};
  Gate gate;
  gate.Hold(late.on.stream);
  for (int sum = 0; sum < 3; ++sum) {
    own[sum]->operand = {static_cast<float>(sum), 10};
    peers[sum].operand = {static_cast<float>(sum), 20};
    CHECK_OK(own[sum]->Enqueue(*communicator, sum));
  }
  {
    OnDevice peer(1);
    for (int sum = 0; sum < 3; ++sum) {
      CHECK_OK(communicator->Enqueue(peers[sum].CallOf(sum), peer.stream));
    }
    LetOthersRun();
    CHECK_EQ(free.result[0], -1.0f);
    gate.Open();
    peer.Synchronize();
  }
  for (int sum = 0; sum < 3; ++sum) {
    own[sum]->on.Synchronize();
    for (const Part* part : {own[sum], &peers[sum]}) {
      CHECK_EQ(part->result[0], static_cast<float>(2 * sum));
      CHECK_EQ(part->result[1], 30.0f);
    }
  }
}

// A rank stages the next while another still takes this one.
TEST(what_is_staged_in_a_row_keeps_apart) {
  constexpr int kRuns = 40;
  auto communicator = MakeOneShot(2);
  const int64_t words = kMostLineBytes / 4 + 4;
  const auto site = FloatSite("permute", {1, 0}, words);
  std::atomic<int> wrong{0};
  ForRanks(2, [&](int rank) {
    OnDevice on(rank);
    std::vector<std::vector<float>> operands, results;
    for (int run = 0; run < kRuns; ++run) {
      operands.emplace_back(words, static_cast<float>(2 * run + rank));
      results.emplace_back(words, -1);
    }
    for (int run = 0; run < kRuns; ++run) {
      const void* from[] = {operands[run].data()};
      void* to[] = {results[run].data()};
      const Call call{site.get(), run + 1, 1, 1, rank, from, to, nullptr};
      wrong += communicator->Enqueue(call, on.stream).failure();
    }
    on.Synchronize();
    for (int run = 0; run < kRuns; ++run) {
      const auto value = static_cast<float>(2 * run + 1 - rank);
      wrong += static_cast<int>(
          words - std::count(results[run].begin(), results[run].end(), value));
    }
  });
  CHECK_EQ(wrong.load(), 0);
}

// Exchanges in two chunks, which have three flags, and in three; sums in between.
TEST(chunks_keep_apart_from_calls_before_and_behind) {
  constexpr int kSize = 4, kRuns = 8;
  auto communicator = MakeOneShot(kSize);
  const int64_t chunk = OneShotMemory::Staged(kSize);
  const auto exchange = [](int64_t part) {
    return FloatSite("all_to_all", {1, 1, 1}, kSize * part);
  };
  const auto two = exchange(chunk * 3 / 2), three = exchange(chunk * 5 / 2);
  const auto small = SumSite(40), staged = SumSite(kMostLineBytesOfSum / 4 + 4);
  CallSite* const sites[] = {two.get(),   small.get(), three.get(),  two.get(),
                             three.get(), two.get(),   staged.get(), three.get()};
  std::atomic<int64_t> wrong{0};
  ForRanks(kSize, [&](int rank) {
    OnDevice on(rank);
    std::mt19937 random(static_cast<unsigned>(rank));
    // What rank `from` sends to `to`, in all words.
    const auto value = [](int64_t run, int from, int64_t to) {
      return static_cast<float>(run * 100 + from * 10 + to);
    };
    std::vector<std::vector<float>> operands, results;
    for (int64_t run = 1; run <= kRuns; ++run) {
      CallSite* const site = sites[run - 1];
      const int64_t words = site->operands()[0].elements;
      const bool is_sum = site == small.get() || site == staged.get();
      std::vector<float>& operand = operands.emplace_back(words);
      for (int64_t i = 0; i < words; ++i) {
        operand[i] = value(run, rank, is_sum ? 0 : i / (words / kSize));
      }
      results.emplace_back(words, -1);
    }
    for (int64_t run = 1; run <= kRuns; ++run) {
      const void* from[] = {operands[run - 1].data()};
      void* to[] = {results[run - 1].data()};
      const Call call{sites[run - 1], run, 1, 1, rank, from, to, nullptr};
      wrong += communicator->Enqueue(call, on.stream).failure();
      if (random() % 3 == 0) on.Synchronize();
    }
    on.Synchronize();
    for (int64_t run = 1; run <= kRuns; ++run) {
      CallSite* const site = sites[run - 1];
      const bool is_sum = site == small.get() || site == staged.get();
      const auto words = static_cast<int64_t>(results[run - 1].size());
      for (int64_t i = 0; i < words; ++i) {
        const int source = static_cast<int>(i / (words / kSize));
        const float expected =
            is_sum ? static_cast<float>(run * 400 + 60) : value(run, source, rank);
        wrong += results[run - 1][i] != expected;
      }
    }
  });
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(NcclStatsOf(*communicator).one_shot_calls, kRuns);
}

// As by lines: they wait for each other, and no result leaves as numbers.
TEST_ALONE(ranks_that_stage_different_calls_get_no_numbers, EXIT_SUCCESS) {
  const int64_t words = kMostLineBytesOfSum / 4 + 4;
  const auto sum = SumSite(words), longer = SumSite(words + 4);
  const auto hop = FloatSite("permute", {1, 0}, words);
  // In two chunks and in three; each has one more, or none.
  constexpr int64_t kChunk = OneShotMemory::kHalfBytes / 2 / 4;
  const auto gather = FloatSite("all_gather", {1}, 2 * kChunk, 4 * kChunk);
  const auto more = FloatSite("all_gather", {1}, 3 * kChunk, 6 * kChunk);
  // As many words, but rows on the other side.
  const auto heads = FloatSite("all_to_all", {1, 64, 0}, 2 * kChunk);
  const auto tokens = FloatSite("all_to_all", {1, 64, 1}, 2 * kChunk);
  for (const auto& [one, other] :
       {std::pair{sum.get(), longer.get()}, std::pair{sum.get(), hop.get()},
        std::pair{gather.get(), more.get()}, std::pair{heads.get(), tokens.get()}}) {
    auto communicator = MakeOneShot(2, kExpires);
    ForRanks(2, [&, one = one, other = other](int rank) {
      Part part(rank, rank == 0 ? one : other);
      CHECK_OK(part.Enqueue(*communicator));
      part.on.Synchronize();
      for (float value : part.result) {
        if (!std::isnan(value)) return CHECK_EQ(value, NAN);
      }
    });
  }
}

// One of two ranks of a hop, whose kernels a test launches by hand: each can be stopped
// for itself.
struct Hopping {
  static constexpr uint32_t kWords = 64;

  explicit Hopping(int rank) : on(rank), rank(rank) {
    CHECK_EQ(Cuda().MemAlloc(&memory, OneShotMemory::kBytes), cuda::kSuccess);
    Cuda().MemsetD8Async(memory, 0, OneShotMemory::kBytes, on.stream);
    on.Synchronize();
  }
  ~Hopping() { Cuda().MemFree(memory); }

  // Sends `flag` in each word, and returns what it has taken by the end.
  std::vector<float> Hop(const char* kernel, uint32_t flag, const Hopping& other) {
    const bool is_staged = kernel == std::string(kStagedKernel);
    const auto kernels = Must(DeviceKernels::Load(Library(), on.context));
    const cuda::Function function = Must(kernels->Find(kernel));
    std::vector<float> operand(kWords, static_cast<float>(flag)), result(kWords, -1);
    OneShotArguments arguments;
    arguments.operand = reinterpret_cast<uint64_t>(operand.data());
    arguments.result = reinterpret_cast<uint64_t>(result.data());
    arguments.stop = reinterpret_cast<uint64_t>(&stop);
    arguments.progress = reinterpret_cast<uint64_t>(&progress);
    for (const Hopping* each : {static_cast<const Hopping*>(this), &other}) {
      arguments.inboxes[each->rank] =
          each->memory + (is_staged ? 0 : OneShotMemory::kLinesAt);
    }
    arguments.part = arguments.words = kWords;
    arguments.rank = static_cast<uint32_t>(rank);
    arguments.ranks = 2;
    arguments.flag = flag;
    arguments.capacity = is_staged ? OneShotMemory::Staged(2) : OneShotMemory::Lines(2);
    arguments.target = arguments.source = static_cast<uint32_t>(other.rank);
    void* parameters[] = {&arguments};
    Cuda().CtxPushCurrent(on.context);
    CHECK_EQ(Cuda().LaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, on.stream, parameters,
                                 nullptr),
             cuda::kSuccess);
    Cuda().CtxPopCurrent(nullptr);
    on.Synchronize();
    return result;
  }

  OnDevice on;
  const int rank;
  cuda::Pointer memory = 0;
  uint32_t stop = 1;  // waits no longer than a look at it
  OneShotProgress progress;
};

// What a rank sent two works ago is overwritten, also where its flag is not. None here
// waits for the other: a rank that does is one work ahead at most.
TEST(a_late_rank_takes_what_is_of_its_own_work_only) {
  setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
  for (const char* kernel : {kLinesKernel, kStagedKernel}) {
    for (const uint32_t works : {1, 2, 3, 4}) {
      Hopping ahead(0), late(1);
      for (uint32_t flag = 1; flag <= works; ++flag) ahead.Hop(kernel, flag, late);
      const float taken = works <= 2 ? 1 : -1;
      CHECK_TRUE(late.Hop(kernel, 1, ahead) ==
                 std::vector<float>(Hopping::kWords, taken));
    }
  }
}

// One of two processes that have a rank each, with hops in a row that are staged.
struct Process {
  static constexpr int64_t kWords = kMostLineBytes / 4 + 4;
  static constexpr int kHops = 3;

  Process(const nccl::UniqueId& id, int rank, double timeout)
      : rank(rank), on(rank), site(FloatSite("permute", {1, 0}, kWords)) {
    const std::vector<NcclDevice> devices = {{100 + rank, rank, rank}};
    Options options;
    options.timeout = timeout;
    options.one_shot = true;
    world = Must(NcclWorld::Create(Library(), 2, devices,
                                   {id.internal, sizeof(id.internal)}, {},
                                   {kHangSeconds}, {}));
    communicator = Make(options, world);
    for (int hop = 0; hop < kHops; ++hop) {
      operands.emplace_back(kWords, static_cast<float>(2 * hop + rank));
      results.emplace_back(kWords, -1);
    }
  }

  void Enqueue(int hops) {
    for (int hop = 0; hop < hops; ++hop) {
      const void* from[] = {operands[hop].data()};
      void* to[] = {results[hop].data()};
      const Call call{site.get(), hop + 1, 1, 1, rank, from, to, nullptr};
      CHECK_OK(communicator->Enqueue(call, on.stream));
    }
  }

  int rank;
  OnDevice on;
  std::unique_ptr<CallSite> site;
  std::shared_ptr<NcclWorld> world;
  std::shared_ptr<Communicator> communicator;
  std::vector<std::vector<float>> operands, results;
};

// What runs behind a kernel that is let go stages over what a late rank reads, whose
// results nobody has poisoned yet.
TEST_ALONE(no_kernel_is_let_go_before_other_processes_have_poisoned_theirs,
           EXIT_SUCCESS) {
  const nccl::UniqueId id = NewId();
  int fails[2];
  CHECK_EQ(pipe(fails), 0);
  Child late([&] {
    auto* const own = new Process(id, 1, kHangSeconds);  // ends with this process
    char byte = 0;
    CHECK_EQ(read(fails[0], &byte, 1), 1);
    own->Enqueue(Process::kHops - 1);
    own->on.Synchronize();
    for (int hop = 0; hop < Process::kHops - 1; ++hop) {
      CHECK_TRUE(own->results[hop] ==
                 std::vector<float>(Process::kWords, static_cast<float>(2 * hop)));
    }
  });
  Process first(id, 0, kExpires);
  CHECK_EQ(NcclStatsOf(*first.communicator).one_shot, "yes");
  first.Enqueue(Process::kHops);
  CHECK_TRUE(Until([&] {
    return CountOf(*first.communicator, FlightRecorder::State::kFailed) > 0;
  }));
  LetOthersRun();
  CHECK_EQ(write(fails[1], "f", 1), 1);
  CHECK_EQ(late.Wait(), EXIT_SUCCESS);
  CHECK_EQ(Cuda().StreamQuery(first.on.stream), cuda::kNotReady);
  first.world->health()->Settle();
  first.on.Synchronize();
  for (const auto& result : first.results) CHECK_TRUE(std::isnan(result[0]));
}

}  // namespace
}  // namespace jaxcomm::testing
