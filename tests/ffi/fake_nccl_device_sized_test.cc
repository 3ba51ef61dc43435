// ragged_all_to_all whose offsets and sizes the GPUs read: engines/device_sized.h, and
// the kernels of kernels/ragged.h, compiled for the host.
#include <cstring>
#include <random>

#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/backends/nccl/failure/process_failure.h"
#include "ffi/backends/nccl/plans/engine_choice.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

// What the ranks of a group say: [rank][slice].
struct Numbers {
  std::vector<std::vector<int64_t>> starts, sizes, places, expected;
  auto all() { return std::array{&starts, &sizes, &places, &expected}; }
};

struct Problem {
  int ranks = 2, each = 1;  // slices of a rank to a rank
  int64_t rows = 8, output_rows = 8;
  size_t row_bytes = 12;
  DataType index = DataType::S32;
  int slices() const { return ranks * each; }
};

size_t BytesOf(DataType type) {
  return type == DataType::S64 || type == DataType::U64 ? 8 : 4;
}

// Slices that fit, with a gap between some of them at their receivers.
Numbers RandomNumbers(const Problem& problem, std::mt19937& random) {
  const auto up_to = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  Numbers made;
  for (auto* numbers : made.all()) {
    numbers->assign(problem.ranks, std::vector<int64_t>(problem.slices()));
  }
  for (int target = 0; target < problem.ranks; ++target) {
    int64_t place = 0;
    for (int source = 0; source < problem.ranks; ++source) {
      for (int i = 0; i < problem.each; ++i) {
        const int slice = target * problem.each + i;
        const int64_t left = problem.output_rows - place;
        const int64_t gap = up_to(std::min<int64_t>(left, 2));
        const int64_t rows = up_to(std::min(
            {left - gap, problem.rows, 2 * problem.output_rows / problem.slices()}));
        made.sizes[source][slice] = rows;
        made.starts[source][slice] = up_to(problem.rows - rows);
        made.places[source][slice] = place + gap;
        made.expected[target][source * problem.each + i] = rows;
        place += gap + rows;
      }
    }
  }
  return made;
}

uint64_t WindowOf(uint64_t bytes) { return (bytes + 15) & ~uint64_t{15}; }

std::unique_ptr<CallSite> SiteOf(const Problem& problem) {
  const auto leaf = [&](int64_t rows) {
    const auto width = static_cast<int64_t>(problem.row_bytes);
    return Leaf{DataType::U8, {rows, width}, rows * width, 1};
  };
  const Leaf numbers{
      problem.index, {problem.slices()}, problem.slices(), BytesOf(problem.index)};
  return MakeSite("ragged_all_to_all", {},
                  {leaf(problem.rows), leaf(problem.output_rows), numbers, numbers,
                   numbers, numbers},
                  {leaf(problem.output_rows)});
}

// One rank's buffers.
struct Ragged {
  Ragged(const Problem& problem, Numbers numbers, int rank, CallSite* site)
      : on(rank),
        rank(rank),
        site(site),
        data(problem.rows * problem.row_bytes),
        result(problem.output_rows * problem.row_bytes) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = Sent(rank, i);
    std::fill(result.begin(), result.end(), kLeftAlone);
    operands = {data.data(), result.data()};
    for (auto* number : numbers.all()) {
      auto& bytes = given.emplace_back();
      for (int64_t value : (*number)[rank]) {
        const auto* begin = reinterpret_cast<const char*>(&value);
        bytes.insert(bytes.end(), begin, begin + BytesOf(problem.index));
      }
    }
    for (const auto& bytes : given) operands.push_back(bytes.data());
    results[0] = result.data();
  }
  ~Ragged() { on.Synchronize(); }

  static constexpr uint8_t kLeftAlone = 3;
  static uint8_t Sent(int rank, size_t i) {
    return static_cast<uint8_t>(7 + 31 * rank + i + i / 251);
  }

  Status Enqueue(Communicator& communicator, int64_t run = 1) {
    return communicator.Enqueue(
        Call{site, run, 1, 1, on_device(), operands.data(), results, nullptr},
        on.stream);
  }
  int on_device() const { return rank; }

  OnDevice on;
  const int rank;
  CallSite* const site;
  std::vector<uint8_t> data, result;
  std::vector<std::vector<char>> given;
  std::vector<const void*> operands;
  void* results[1];
};

std::vector<uint8_t> Expected(const Problem& problem, const Numbers& numbers,
                              int target) {
  std::vector<uint8_t> result(problem.output_rows * problem.row_bytes,
                              Ragged::kLeftAlone);
  for (int source = 0; source < problem.ranks; ++source) {
    for (int i = 0; i < problem.each; ++i) {
      const int slice = target * problem.each + i;
      const auto bytes_of = [&](const auto& of) {
        return static_cast<size_t>(of[source][slice]) * problem.row_bytes;
      };
      for (size_t k = 0; k < bytes_of(numbers.sizes); ++k) {
        result[bytes_of(numbers.places) + k] =
            Ragged::Sent(source, bytes_of(numbers.starts) + k);
      }
    }
  }
  return result;
}

std::shared_ptr<Communicator> MakeSized(const Problem& problem, uint64_t window_bytes,
                                        OnFailure on_failure = OnFailure::kPoison,
                                        double timeout = kHangSeconds) {
  Options options;
  options.size = problem.ranks;
  options.device_sizes = true;
  options.window_bytes = window_bytes;
  options.on_failure = on_failure;
  options.timeout = timeout;
  auto made = Make(options);
  CHECK_EQ(NcclStatsOf(*made).device_sizes, std::string("yes"));
  return made;
}

void CheckResults(const std::shared_ptr<Communicator>& communicator,
                  const Problem& problem, const Numbers& numbers, CallSite* site,
                  int64_t run = 1) {
  ForRanks(problem.ranks, [&](int rank) {
    Ragged ragged(problem, numbers, rank, site);
    CHECK_OK(ragged.Enqueue(*communicator, run));
    ragged.on.Synchronize();
    CHECK_TRUE(ragged.result == Expected(problem, numbers, rank));
  });
}

TEST(slices_land_at_their_offsets_and_no_host_reads_them) {
  const Problem problems[] = {
      {2, 1, 8, 60, 12, DataType::S32},   {3, 2, 17, 80, 7, DataType::U32},
      {4, 3, 50, 200, 16, DataType::S64}, {2, 5, 300, 1000, 258, DataType::U64},
      {3, 1, 9, 60, 1000, DataType::S32},
  };
  std::mt19937 random(1);
  for (const Problem& problem : problems) {
    const auto site = SiteOf(problem);
    // Results of many windows, of two, and of one that is larger.
    const uint64_t least = WindowOf(problem.rows * problem.row_bytes);
    for (uint64_t window : {least, 2 * least, uint64_t{1} << 20}) {
      const auto communicator = MakeSized(problem, window);
      TheFake().clear_trace();
      for (int64_t run = 1; run <= 3; ++run) {
        CheckResults(communicator, problem, RandomNumbers(problem, random), site.get(),
                     run);
      }
      CHECK_EQ(Count("ncclSend"), 0);
      CHECK_EQ(Count("cuMemcpyDtoDAsync_v2"), 0);
      CHECK_EQ(NcclStatsOf(*communicator).device_sized_calls, 3);
      CHECK_TRUE(IsIdle(*communicator));
    }
  }
}

// Hosts read the numbers of what is larger, on the same communicator. They lie where
// GPUs read those of a call before, perhaps on another stream.
TEST(hosts_read_sizes_of_what_one_window_does_not_hold) {
  const Problem fits = {2, 1, 8, 8 * kMostWindowsOfResult, 16, DataType::S32};
  Problem sends_more = fits, gets_more = fits;
  ++sends_more.rows;
  ++gets_more.output_rows;
  const auto communicator = MakeSized(fits, 8 * 16);
  std::mt19937 random(5);
  int64_t run = 0, by_gpus = 0;
  for (const Problem& problem : {fits, sends_more, fits, gets_more}) {
    const auto site = SiteOf(problem);
    TheFake().clear_trace();
    CheckResults(communicator, problem, RandomNumbers(problem, random), site.get(),
                 ++run);
    const bool is_by_gpus = run % 2 == 1;
    by_gpus += is_by_gpus ? 1 : 0;
    CHECK_EQ(NcclStatsOf(*communicator).device_sized_calls, by_gpus);
    CHECK_EQ(Count("cuMemcpyDtoDAsync_v2") > 0, !is_by_gpus);
    // Each rank has a stream of its own for each call.
    CHECK_TRUE(Count("cuStreamWaitEvent") >= (run == 1 ? 0 : 2));
  }
  CHECK_TRUE(IsIdle(*communicator));
}

// The kernel refuses what the planner refuses, and nothing else.
TEST(what_does_not_fit_is_what_the_planner_finds) {
  std::mt19937 random(2);
  int refused = 0;
  for (int turn = 0; turn < 60; ++turn) {
    const DataType types[] = {DataType::S32, DataType::U32, DataType::S64,
                              DataType::U64};
    const Problem problem = {2 + turn % 2, 1 + turn % 3, 6, 9, 4, types[turn % 4]};
    const auto site = SiteOf(problem);
    Numbers numbers = RandomNumbers(problem, random);
    // One number is another, perhaps of a slice that is empty or fits all the same.
    const int64_t others[] = {-1, 0, 1, 5, 6, 7, INT64_MAX, INT64_MIN, 1LL << 32};
    const int source = static_cast<int>(random() % problem.ranks);
    const int slice = static_cast<int>(random() % problem.slices());
    int64_t& changed = (*numbers.all()[random() % 4])[source][slice];
    changed = others[random() % 9];
    if (BytesOf(problem.index) == 4) changed = static_cast<int32_t>(changed);
    // Or two slices of one rank overlap, and nothing else is wrong.
    if (turn % 6 == 1) {
      numbers = RandomNumbers(problem, random);
      numbers.places[source][1] = numbers.places[source][0];
    }
    const auto communicator = MakeSized(problem, 4096);
    std::vector<std::unique_ptr<Ragged>> ranks(problem.ranks);
    std::vector<const void* const*> operands_of;
    ForRanks(problem.ranks, [&](int rank) {
      ranks[rank] = std::make_unique<Ragged>(problem, numbers, rank, site.get());
      CHECK_OK(ranks[rank]->Enqueue(*communicator));
      ranks[rank]->on.Synchronize();
    });
    for (const auto& rank : ranks) operands_of.push_back(rank->operands.data());
    const Status planned = site->MakePlan(problem.ranks, operands_of.data()).status();
    refused += planned.failure();
    for (auto& rank : ranks) {
      if (planned.success()) {
        CHECK_TRUE(rank->result == Expected(problem, numbers, rank->rank));
        continue;
      }
      // On every rank, all of it.
      CHECK_TRUE(rank->result == std::vector<uint8_t>(rank->result.size(), 0xff));
      const std::string found(planned.message());
      CHECK_FAILS(rank->Enqueue(*communicator, 2),
                  found.substr(found.find("('x',): ") + 8));
    }
    if (planned.success()) CHECK_TRUE(IsIdle(*communicator));
  }
  CHECK_TRUE(refused >= 20 && refused <= 55);
}

TEST(the_watch_says_what_did_not_fit) {
  const Problem problem;
  const auto site = SiteOf(problem);
  std::mt19937 random(3);
  Numbers numbers = RandomNumbers(problem, random);
  numbers.sizes[1][0] = numbers.expected[0][1] = 9;
  const auto communicator = MakeSized(problem, 4096);
  ProcessFailure::Get().Forget();
  ForRanks(2, [&](int rank) {
    Ragged ragged(problem, numbers, rank, site.get());
    CHECK_OK(ragged.Enqueue(*communicator));
    ragged.on.Synchronize();
  });
  // Nobody calls again.
  CHECK_TRUE(Until([] { return !ProcessFailure::Get().first().empty(); }));
  CHECK_CONTAINS(ProcessFailure::Get().first(), "slice 0 of rank 1 takes 9 rows");
  ProcessFailure::Get().Forget();
}

// A rank that does not come: nothing of ours waits for it but NCCL.
void WaitForARankThatDoesNotCome(OnFailure on_failure) {
  const Problem problem;
  const auto site = SiteOf(problem);
  std::mt19937 random(4);
  const auto communicator = MakeSized(problem, 4096, on_failure, kExpires);
  Ragged ragged(problem, RandomNumbers(problem, random), 0, site.get());
  CHECK_OK(ragged.Enqueue(*communicator));
  const bool is_poisoned = on_failure == OnFailure::kPoison;
  CHECK_EQ(ragged.on.Synchronize(), is_poisoned ? cuda::kSuccess : kStopped);
  if (is_poisoned) {
    CHECK_TRUE(ragged.result == std::vector<uint8_t>(ragged.result.size(), 0xff));
  }
  CHECK_FAILS(ragged.Enqueue(*communicator, 2), "not done after");
}

TEST_ALONE(a_rank_that_does_not_come_is_waited_for_until_the_timeout, EXIT_SUCCESS) {
  WaitForARankThatDoesNotCome(OnFailure::kRaise);
}
TEST_ALONE(likewise_where_results_are_poisoned, EXIT_SUCCESS) {
  WaitForARankThatDoesNotCome(OnFailure::kPoison);
}

}  // namespace
}  // namespace jaxcomm::testing
