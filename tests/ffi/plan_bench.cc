// What it costs one rank of a large group to plan a call site, without any device:
// milliseconds, and the most memory of the heap that was in use at a time. Not a test.
//
//   plan_bench [ranks [leaves [collective]]]
#include <malloc.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/steps.h"
#include "ffi/core/call_site.h"
#include "ffi/core/plan.h"
#include "ffi/planners/collectives.h"

namespace {

int64_t bytes_now = 0, bytes_peak = 0;  // one thread

}  // namespace

// Not inline: GCC takes what it inlined for a mismatch of new and free.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  void* const made = std::malloc(bytes);
  if (made == nullptr) throw std::bad_alloc();
  bytes_now += static_cast<int64_t>(malloc_usable_size(made));
  if (bytes_now > bytes_peak) bytes_peak = bytes_now;
  return made;
}

__attribute__((noinline)) void operator delete(void* made) noexcept {
  bytes_now -= static_cast<int64_t>(malloc_usable_size(made));
  std::free(made);
}

void operator delete(void* made, std::size_t) noexcept { operator delete(made); }

namespace jaxcomm {
namespace {

struct Case {
  const char* collective;
  std::vector<int64_t> params;
  std::vector<Leaf> operands, results;
};

Leaf LeafOf(DataType dtype, std::vector<int64_t> dims, size_t bytes) {
  int64_t elements = 1;
  for (int64_t dim : dims) elements *= dim;
  return Leaf{dtype, std::move(dims), elements, bytes};
}

// Contiguous pieces, as jaxcomm/primitives/nccl_rewrites.py makes them.
std::vector<Case> Cases(int ranks, int leaves) {
  const auto repeat = [&](std::vector<int64_t> first, std::vector<int64_t> each) {
    for (int leaf = 0; leaf < leaves; ++leaf) {
      first.insert(first.end(), each.begin(), each.end());
    }
    return first;
  };
  const Leaf small = LeafOf(DataType::F32, {16}, 4);
  const Leaf large = LeafOf(DataType::F32, {ranks, 16}, 4);
  const std::vector<Leaf> smalls(static_cast<size_t>(leaves), small);
  const std::vector<Leaf> larges(static_cast<size_t>(leaves), large);
  std::vector<int64_t> ring;
  for (int rank = 0; rank < ranks; ++rank) ring.push_back((rank + ranks - 1) % ranks);
  const Leaf index = LeafOf(DataType::S32, {ranks}, 4);
  return {
      {"all_gather", repeat({}, {1}), smalls, larges},
      {"all_reduce", {}, smalls, smalls},
      {"all_to_all", repeat({}, {1, 1, 0}), larges, larges},
      {"gather", repeat({0}, {1}), smalls, larges},
      {"permute", ring, smalls, smalls},
      {"ragged_all_to_all", {}, {large, large, index, index, index, index}, {large}},
      {"reduce_scatter", repeat({}, {1}), larges, smalls},
      {"scatter", repeat({0}, {1}), larges, smalls},
  };
}

// Row r of every rank goes to rank r: operands[rank][operand].
class RaggedOperands {
 public:
  explicit RaggedOperands(int ranks) : rows_(ranks), ones_(ranks, 1), mine_(ranks) {
    for (int i = 0; i < ranks; ++i) rows_[i] = i;
    for (int rank = 0; rank < ranks; ++rank) {
      // Offsets in the results of the other ranks.
      mine_[rank].assign(ranks, rank);
      of_rank_.push_back({nullptr, nullptr, rows_.data(), ones_.data(),
                          mine_[rank].data(), ones_.data()});
    }
    for (const auto& operands : of_rank_) pointers_.push_back(operands.data());
  }
  const void* const* const* get() const { return pointers_.data(); }

 private:
  std::vector<int32_t> rows_, ones_;
  std::vector<std::vector<int32_t>> mine_;
  std::vector<std::vector<const void*>> of_rank_;
  std::vector<const void* const*> pointers_;
};

// `natives`: which functions for whole collectives the library has.
void Measure(const Case& test, int ranks, int rank, Natives natives) {
  CallSite site(CallSite::Attributes{test.collective, "('i',)", 1, 0, ReduceOp::kSum,
                                     test.params},
                *FindCollective(test.collective));
  const bool reads_operands = site.plan_reads_operands();
  const RaggedOperands ragged(reads_operands ? ranks : 0);
  site.SetShapes(test.operands, test.results);
  const int64_t before = bytes_now;
  bytes_peak = bytes_now;
  const auto begin = std::chrono::steady_clock::now();
  Status status;
  size_t made = 0;
  {
    const auto plan = site.MakePlan(ranks, reads_operands ? ragged.get() : nullptr);
    status = plan.status();
    if (plan) {
      const auto steps = MakeSteps(site, *plan, rank, natives);
      status = steps.status();
      if (steps) made = steps->local.size() + steps->grouped.size();
    }
  }
  const std::chrono::duration<double, std::milli> took =
      std::chrono::steady_clock::now() - begin;
  std::printf("%-18s %6zu %10.2f ms %10.2f MiB %8zu steps%s%s\n", test.collective,
              test.results.size(), took.count(),
              static_cast<double>(bytes_peak - before) / (1 << 20), made,
              status.failure() ? "  " : "",
              status.failure() ? status.message().c_str() : "");
  std::fflush(stdout);
}

}  // namespace
}  // namespace jaxcomm

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 1024;
  const int leaves = argc > 2 ? std::atoi(argv[2]) : 200;
  const std::string only = argc > 3 ? argv[3] : "";
  if (ranks < 1 || leaves < 1) {
    std::fprintf(stderr, "usage: %s [ranks [leaves [collective]]]\n", argv[0]);
    return EXIT_FAILURE;
  }
  using jaxcomm::Natives;
  const std::pair<Natives, const char*> libraries[] = {{Natives::kOf228, "2.28"},
                                                       {Natives::kOf218, "2.18"},
                                                       {Natives::kNone, "sends only"}};
  for (const auto& [natives, name] : libraries) {
    std::printf("One rank of %d, NCCL %s: leaves, time, most heap, steps\n", ranks,
                name);
    for (const jaxcomm::Case& test : jaxcomm::Cases(ranks, leaves)) {
      if (only.empty() || only == test.collective) {
        jaxcomm::Measure(test, ranks, ranks / 2, natives);
      }
    }
  }
  return EXIT_SUCCESS;
}
