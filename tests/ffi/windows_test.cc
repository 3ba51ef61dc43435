// Tests what a rank has registered with its communicator, and the look-up of a call.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "ffi/backends/nccl/symmetric_memory.h"
#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

constexpr int64_t kBytes = 1 << 20;

int windows = 0;  // that NCCL has given and not taken back

char* Segment(uint64_t number) {
  return reinterpret_cast<char*>(uintptr_t{number} * 4 * kBytes);
}

// Gives windows for even segments only.
NcclLibrary Nccl() {
  NcclLibrary library;
  library.nccl.CommWindowRegister = [](nccl::Comm, void* data, size_t,
                                       nccl::Window* window, int) {
    const bool even = reinterpret_cast<uintptr_t>(data) / (4 * kBytes) % 2 == 0;
    *window = even ? static_cast<nccl::Window>(data) : nullptr;
    windows += even;
    return nccl::kSuccess;
  };
  library.nccl.CommWindowDeregister = [](nccl::Comm, nccl::Window) {
    --windows;
    return nccl::kSuccess;
  };
  return library;
}

struct Registered {
  NcclLibrary library = Nccl();
  nccl::Comm comm = reinterpret_cast<nccl::Comm>(&library);
  Windows windows;

  std::string Add(uint64_t segment) {
    Status status = windows.Begin(library, comm, Segment(segment), kBytes, segment);
    return windows.Finish(library, comm, segment, status);
  }
};

TEST(whole_ranges_of_registered_segments_are_covered) {
  Registered rank;
  CHECK_EQ(rank.Add(2), std::string("window"));
  CHECK_EQ(rank.Add(4), std::string("window"));
  for (const uint64_t segment : {2, 4}) {
    CHECK_TRUE(rank.windows.Cover(Segment(segment), kBytes));
    CHECK_TRUE(rank.windows.Cover(Segment(segment) + kBytes - 1, 1));
    CHECK_TRUE(!rank.windows.Cover(Segment(segment) + 1, kBytes));
    CHECK_TRUE(!rank.windows.Cover(Segment(segment) - 1, 1));
  }
  CHECK_TRUE(!rank.windows.Cover(Segment(3), 1));
  rank.windows.Remove(rank.library, rank.comm, 2);
  CHECK_TRUE(!rank.windows.Cover(Segment(2), 1));
  CHECK_TRUE(rank.windows.Cover(Segment(4), 1));
  CHECK_EQ(windows, 1);
  rank.windows.RemoveAll(rank.library, rank.comm);
  CHECK_EQ(windows, 0);
}

TEST(what_gets_no_window_is_not_covered) {
  Registered rank;
  CHECK_EQ(rank.Add(3), std::string("NCCL gave no window"));
  CHECK_TRUE(rank.windows.How(3) == nullptr);
  CHECK_TRUE(!rank.windows.Cover(Segment(3), 1));
}

// Reported, not asserted: a benchmark checks speed.
TEST(the_cost_of_a_look_up) {
  constexpr int kRounds = 1 << 20;
  for (const uint64_t segments : {1, 8, 64}) {
    Registered rank;
    for (uint64_t i = 1; i <= segments; ++i) rank.Add(2 * i);
    int64_t found = 0;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kRounds; ++i) {
      const uint64_t segment = 2 * (1 + static_cast<uint64_t>(i) % segments);
      found += rank.windows.Cover(Segment(segment) + 64, 256);
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    CHECK_EQ(found, kRounds);
    std::printf("  %d segments: %.1f ns a look-up\n", static_cast<int>(segments),
                std::chrono::duration<double, std::nano>(took).count() / kRounds);
    rank.windows.RemoveAll(rank.library, rank.comm);
  }
}

}  // namespace
}  // namespace jaxcomm::testing
