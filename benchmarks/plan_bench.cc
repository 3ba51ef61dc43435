// What it costs one rank of a large group to plan a call site, without any device:
// milliseconds, and the most memory of the heap that was in use at a time. Not a test.
//
//   plan_bench [ranks [leaves [collective]]]
#include <malloc.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/plans/steps.h"
#include "ffi/core/call_site.h"
#include "ffi/core/plan.h"
#include "ffi/planners/collectives.h"
#include "tests/ffi/waiting.h"

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

Leaf Floats(std::vector<int64_t> dims) {
  int64_t elements = 1;
  for (int64_t dim : dims) elements *= dim;
  return Leaf{DataType::F32, std::move(dims), elements, 4};
}

// Contiguous pieces, as jaxcomm/primitives/nccl_rewrites.py makes them.
std::vector<Case> Cases(int ranks, int leaves) {
  const auto repeat = [&](std::vector<int64_t> first, std::vector<int64_t> each) {
    for (int leaf = 0; leaf < leaves; ++leaf) {
      first.insert(first.end(), each.begin(), each.end());
    }
    return first;
  };
  const Leaf small = Floats({16});
  const Leaf large = Floats({ranks, 16});
  const std::vector<Leaf> smalls(static_cast<size_t>(leaves), small);
  const std::vector<Leaf> larges(static_cast<size_t>(leaves), large);
  std::vector<int64_t> ring;
  for (int rank = 0; rank < ranks; ++rank) ring.push_back((rank + ranks - 1) % ranks);
  return {
      {"all_gather", repeat({}, {1}), smalls, larges},
      {"all_reduce", {}, smalls, smalls},
      {"all_to_all", repeat({}, {1, 1, 0}), larges, larges},
      {"gather", repeat({0}, {1}), smalls, larges},
      {"permute", ring, smalls, smalls},
      {"reduce_scatter", repeat({}, {1}), larges, smalls},
      {"scatter", repeat({0}, {1}), larges, smalls},
  };
}

// `natives`: which functions for whole collectives the library has.
void Measure(const Case& test, int ranks, int rank, Natives natives) {
  CallSite site(CallSite::Attributes{test.collective, "('i',)", 1, 0, ReduceOp::kSum,
                                     test.params},
                *FindCollective(test.collective));
  site.SetShapes(test.operands, test.results);
  const int64_t before = bytes_now;
  bytes_peak = bytes_now;
  const testing::Stopwatch begin;
  Status status;
  size_t made = 0;
  {
    const auto plan = site.MakePlan(ranks, /*operands_of=*/nullptr);
    status = plan.status();
    if (plan) {
      const auto steps = MakeSteps(site, *plan, rank, natives);
      status = steps.status();
      if (steps) made = steps->local.size() + steps->grouped.size();
    }
  }
  const double took = 1000 * begin.seconds();
  std::printf("%-18s %6zu %10.2f ms %10.2f MiB %8zu steps%s%s\n", test.collective,
              test.results.size(), took,
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
