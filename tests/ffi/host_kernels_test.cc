// The GPU kernels, compiled for the host as in the stand-in, without its driver: the
// failure of devices is this file's.
#include "tests/doubles/nccl/host_kernels.h"

#include <cstdint>
#include <cstring>
#include <random>

#include "ffi/backends/nccl/kernels/kernels.h"
#include "tests/doubles/nccl/failed.h"
#include "tests/doubles/nccl/grid.h"
#include "tests/ffi/check.h"

namespace jaxcomm::fake {

static std::atomic<cuda::Result> failure{cuda::kSuccess};
void FailDevices(cuda::Result error) { failure = error; }
cuda::Result DeviceFailure() { return failure; }

}  // namespace jaxcomm::fake

namespace jaxcomm::testing {
namespace {

template <typename Arguments>
void Run(const char* name, unsigned blocks, unsigned threads,
         const Arguments& arguments) {
  const fake::HostKernel* const kernel = fake::FindHostKernel(name);
  CHECK_TRUE(kernel != nullptr);
  if (kernel == nullptr) return;
  CHECK_EQ(kernel->argument_bytes, sizeof(arguments));
  fake::RunGrid(blocks, threads,
                [&] { kernel->run(reinterpret_cast<const char*>(&arguments)); });
}

uint64_t Address(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

TEST(a_grid_has_all_its_threads_at_once) {
  std::atomic<int> here{0}, of_first_block{0}, wrong{0};
  fake::RunGrid(100, 1000, [&] {
    const fake::DeviceThread& own = fake::this_thread;
    ++here;
    if (own.block.x == 0) ++of_first_block;
    const int all = static_cast<int>(own.blocks.x * own.threads.x);
    // Ends only if the others run meanwhile.
    wrong += !Until([&] { return here == all; });
  });
  CHECK_EQ(wrong.load(), 0);
  CHECK_TRUE(of_first_block > 1);
  CHECK_TRUE(here > of_first_block);
}

TEST(a_barrier_holds_a_block_and_tells_all_of_it_what_one_says) {
  std::atomic<int> before{0}, wrong{0};
  constexpr int kTurns = 200;
  fake::RunGrid(1, 4, [&] {
    const fake::DeviceThread& own = fake::this_thread;
    const auto threads = static_cast<int>(own.threads.x);
    for (int turn = 0; turn < kTurns; ++turn) {
      ++before;
      const bool value = turn % 3 == 0 && own.thread.x == own.threads.x - 1;
      wrong += fake::WaitForBlock(value) != (turn % 3 == 0);
      wrong += before < (turn + 1) * threads;
    }
  });
  CHECK_EQ(wrong.load(), 0);
}

// Ranks of one process, each with its inbox.
struct Ranks {
  explicit Ranks(uint32_t size, uint32_t words) : arguments(size) {
    for (uint32_t rank = 0; rank < size; ++rank) {
      inboxes.emplace_back(2 * size * words);
      operands.emplace_back(words);
      results.emplace_back(words);
    }
    for (uint32_t rank = 0; rank < size; ++rank) {
      OneShotArguments& own = arguments[rank];
      own.operand = Address(operands[rank].data());
      own.result = Address(results[rank].data());
      own.stop = Address(&stop);
      for (uint32_t to = 0; to < size; ++to) {
        own.inboxes[to] = Address(inboxes[to].data());
      }
      own.words = own.capacity = words;
      own.rank = rank;
      own.ranks = size;
    }
  }

  std::vector<std::vector<uint64_t>> inboxes;
  std::vector<std::vector<uint32_t>> operands, results;
  std::vector<OneShotArguments> arguments;
  uint32_t stop = 0;
};

// The stand-in relies on it: it runs fewer threads than it is asked for. A rank may be
// one sum ahead of another, so both halves of an inbox are in use.
TEST(ranks_with_any_numbers_of_threads_add) {
  constexpr uint32_t kSize = 3, kWords = 37, kSums = 100;
  Ranks ranks(kSize, kWords);
  const unsigned blocks[] = {1, 2, 2}, threads[] = {1, 1, 2};
  const auto operand = [](uint32_t sum, uint32_t rank, uint32_t i) {
    return sum * 2654435761u + rank * 40503u + i;
  };
  std::atomic<int> wrong{0};
  std::vector<std::thread> streams;
  for (uint32_t rank = 0; rank < kSize; ++rank) {
    streams.emplace_back([&, rank] {
      for (uint32_t sum = 1; sum <= kSums; ++sum) {
        for (uint32_t i = 0; i < kWords; ++i) {
          ranks.operands[rank][i] = operand(sum, rank, i);
        }
        ranks.arguments[rank].flag = sum;
        Run("jaxcomm_sum_int32", blocks[rank], threads[rank], ranks.arguments[rank]);
        for (uint32_t i = 0; i < kWords; ++i) {
          uint32_t wanted = 0;
          for (uint32_t from = 0; from < kSize; ++from) wanted += operand(sum, from, i);
          wrong += ranks.results[rank][i] != wanted;
        }
      }
    });
  }
  for (std::thread& stream : streams) stream.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(a_sum_that_is_told_to_stop_leaves_its_result) {
  Ranks ranks(2, 5);
  ranks.results[0].assign(5, 77);
  ranks.arguments[0].flag = 1;
  __atomic_store_n(&ranks.stop, 1u, __ATOMIC_RELAXED);
  Run("jaxcomm_sum_int32", 1, 32, ranks.arguments[0]);  // returns, or the test hangs
  CHECK_TRUE(ranks.results[0] == std::vector<uint32_t>(5, 77));
}

struct Poisoned {
  explicit Poisoned(uint32_t value, size_t bytes = 100000)
      : word(value), memory(bytes) {
    std::mt19937 random(3);
    for (uint8_t& byte : memory) byte = static_cast<uint8_t>(random() % 255);
    wanted = memory;
    arguments.word = Address(&word);
  }

  void Add(size_t from, size_t bytes) {
    arguments.results[arguments.count++] = {Address(memory.data() + from), bytes};
    if (word == 0) return;
    for (size_t i = from; i < from + bytes; ++i) wanted[i] = 0xff;
  }

  void Check() {
    Run(kPoisonKernel, 1, 256, arguments);
    CHECK_TRUE(memory == wanted);
  }

  uint32_t word;
  std::vector<uint8_t> memory, wanted;
  PoisonArguments arguments;
};

TEST(poison_fills_any_length_at_any_address_unless_the_word_is_0) {
  for (uint32_t word : {0u, 1u, 0x80000000u}) {
    for (size_t offset = 0; offset < 17; offset += word == 1 ? 1 : 8) {
      for (size_t bytes = 0; bytes < 40; ++bytes) {
        Poisoned poisoned(word, 200);
        poisoned.Add(50 + offset, bytes);
        poisoned.Check();
      }
    }
  }
}

TEST(poison_fills_as_many_results_as_there_are) {
  constexpr uint32_t kMost = PoisonArguments::kMostPoisoned;
  for (uint32_t count : {0u, 1u, kMost - 1, kMost}) {
    Poisoned poisoned(1);
    for (uint32_t i = 0; i < count; ++i) poisoned.Add(3001 * i, 2000 + 7 * i);
    // Not in the list any more.
    if (count < kMost) poisoned.arguments.results[count] = {Address(&count), 4};
    poisoned.Check();
  }
}

TEST(stop_fails_all_devices_and_ends_what_runs) {
  Ranks ranks(2, 100);
  ranks.results[0].assign(100, 77);
  ranks.arguments[0].flag = 1;
  std::atomic<bool> has_ended{false};
  std::thread waiting([&] {
    Run("jaxcomm_sum_int32", 2, 256, ranks.arguments[0]);
    has_ended = true;
  });
  LetOthersRun();
  CHECK_TRUE(!has_ended);
  CHECK_EQ(fake::DeviceFailure(), cuda::kSuccess);
  uint64_t memory = 0x1234;
  Run(kStopKernel, 1, 1, Address(&memory));
  CHECK_EQ(static_cast<int>(fake::DeviceFailure()), 716);  // a misaligned address
  CHECK_EQ(memory, uint64_t{0x1234});
  waiting.join();
  fake::failure = cuda::kSuccess;
  CHECK_TRUE(ranks.results[0] == std::vector<uint32_t>(100, 77));
}

}  // namespace
}  // namespace jaxcomm::testing
