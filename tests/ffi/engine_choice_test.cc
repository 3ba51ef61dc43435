// Which engine does a call, by each limit, and what a rank has registered with its
// communicator.
#include "ffi/backends/nccl/plans/engine_choice.h"

#include <cstdint>

#include "ffi/backends/nccl/engines/symmetric_memory.h"
#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

constexpr int64_t kMiB = 1 << 20;

CallFacts Moves(int64_t bytes_sent = kLeastCopiedBytes, int64_t copies = 1) {
  CallFacts call;
  call.size = 2;
  call.copies_serve = true;
  call.bytes_sent = bytes_sent;
  call.copies = copies;
  return call;
}

CallFacts Works(int works = 1) {
  CallFacts call;
  call.size = 2;
  call.works = works;
  return call;
}

// A node where every engine is there, and a policy that leaves all to jaxcomm.
const EnginePolicy kAny{true, true};
const EngineTopology kNode{true, false, true, ~uint32_t{0}};
// The same with a process for each GPU.
const EngineTopology kProcesses{false, true, true, ~uint32_t{0}};

void Expect(EngineKind kind, const CallFacts& call, const EnginePolicy& policy = kAny,
            const EngineTopology& topology = kNode) {
  CHECK_TRUE(Choose(call, policy, topology) == kind);
}

TEST(gpus_read_the_sizes_of_what_one_window_holds) {
  constexpr int64_t kWindow = 32 * kMiB, kMost = kMostWindowsOfResult * kWindow;
  CHECK_TRUE(SizesAreForGpus(0, 1, kWindow));
  CHECK_TRUE(SizesAreForGpus(kWindow, kMost, kWindow));
  CHECK_TRUE(!SizesAreForGpus(kWindow + 1, 1, kWindow));
  CHECK_TRUE(!SizesAreForGpus(1, kMost + 1, kWindow));
}

TEST(between_processes_copies_take_what_moves_along_pairs) {
  constexpr auto kMapped = EngineKind::kMapped, kNccl = EngineKind::kNccl;
  const auto expect = [](EngineKind kind, const CallFacts& call) {
    Expect(kind, call, kAny, kProcesses);
  };
  CallFacts call = Moves(kLeastMappedBytes, 4);
  expect(kNccl, call);
  call.moves_along_pairs = true;
  expect(kMapped, call);
  Expect(kNccl, call, {false, true}, kProcesses);
  call.copies = 5;
  expect(kNccl, call);
  call = Moves(kLeastMappedBytes - 1);
  call.moves_along_pairs = true;
  expect(kNccl, call);
  call.bytes_sent = kMostMappedBytes;
  expect(kMapped, call);
  ++call.bytes_sent;
  expect(kNccl, call);
  call.is_start = true;
  expect(kMapped, call);
  call.may_be_captured = true;
  expect(kNccl, call);
}

TEST(between_processes_copies_take_the_starts_of_gathers) {
  CallFacts call = Moves(kLeastBytesOfMore, 8);
  call.size = 4;
  call.is_start = call.gathers_in_slots = true;
  Expect(EngineKind::kMapped, call, kAny, kProcesses);
  Expect(EngineKind::kNccl, call, {false, true}, kProcesses);
  const auto expect_nccl = [call](auto&& change) {
    CallFacts other = call;
    change(other);
    Expect(EngineKind::kNccl, other, kAny, kProcesses);
  };
  expect_nccl([](CallFacts& call) { --call.bytes_sent; });
  expect_nccl([](CallFacts& call) { call.copies = 9; });
  expect_nccl([](CallFacts& call) { call.is_start = false; });
  // What is staged in turns would hold up what comes behind the start.
  expect_nccl([](CallFacts& call) { call.gathers_in_slots = false; });
  // Ranks may have other memory. NCCL sends between registered and other memory never.
  call.is_symmetric = true;
  Expect(EngineKind::kMapped, call, kAny, kProcesses);
}

TEST(rows_are_copied_where_nccl_would_pack_them) {
  CallFacts call = Moves(kLeastBytesOfMore, 4);
  call.is_packed_for_nccl = true;
  Expect(EngineKind::kCopy, call);
  Expect(EngineKind::kMapped, call, kAny, kProcesses);
  Expect(EngineKind::kNccl, call, {false, true}, kProcesses);
  call.size = 4;
  Expect(EngineKind::kNccl, call);
  Expect(EngineKind::kMapped, call, kAny, kProcesses);
  call.bytes_sent = 2 * kMostMappedBytes;
  Expect(EngineKind::kMapped, call, kAny, kProcesses);
  call.copies = 1000;
  Expect(EngineKind::kNccl, call, kAny, kProcesses);
}

TEST(many_ranks_of_a_process_copy_what_is_long) {
  constexpr auto kCopy = EngineKind::kCopy, kNccl = EngineKind::kNccl;
  CallFacts call = Moves(kAny.least_copied_to_many);
  call.size = 4;
  Expect(kCopy, call);
  --call.bytes_sent;
  Expect(kNccl, call);
  call.moves_along_pairs = true;
  Expect(kCopy, call);
  call.moves_along_pairs = false;
  call.is_start = true;  // beside other work
  Expect(kCopy, call);
  call.bytes_sent = kLeastCopiedBytes - 1;
  Expect(kNccl, call);
  call.moves_along_pairs = true;
  Expect(kCopy, call);
}

TEST(kernels_exchange_what_is_not_long_and_rows_to_many) {
  constexpr auto kOurs = EngineKind::kOneShot, kNccl = EngineKind::kNccl;
  CallFacts call = Works();
  call.size = 4;
  call.is_staged = true;
  call.bytes_exchanged = 3 * kMostExchangedBytes;
  Expect(kOurs, call);
  ++call.bytes_exchanged;
  Expect(kNccl, call);
  call.is_symmetric = true;
  call.bytes_exchanged = 3 * kMostStagedBytes;
  Expect(kOurs, call);
  ++call.bytes_exchanged;
  Expect(kNccl, call);
  // Rows that NCCL would pack, also where copies could move them.
  call = Moves(256 * kMiB, 12);
  call.size = 4;
  call.works = 3;
  call.is_staged = call.exchanges_rows = call.is_packed_for_nccl = true;
  call.bytes_exchanged = call.bytes_sent;
  Expect(kOurs, call);
  Expect(kOurs, call, kAny, kProcesses);
  Expect(EngineKind::kMapped, call, {true, false}, kProcesses);
  call.size = 2;
  Expect(EngineKind::kCopy, call);
}

TEST(each_limit_counts) {
  constexpr auto kCopy = EngineKind::kCopy, kSum = EngineKind::kOneShot;
  constexpr auto kNccl = EngineKind::kNccl;
  Expect(kCopy, Moves());
  Expect(kCopy, Moves(256 * kMiB, 256));
  Expect(kNccl, Moves(kLeastCopiedBytes - 1));
  Expect(kNccl, Moves(256 * kMiB, 257));
  CallFacts call = Moves(kLeastBytesOfMore, 4);
  call.is_start = true;
  Expect(kCopy, call);
  call.copies = 5;
  Expect(kNccl, call);
  call.bytes_sent = kLeastBytesOfMore - 1;
  Expect(kNccl, call);
  call = Moves();
  call.is_symmetric = true;
  Expect(kNccl, call);
  call.moves_along_pairs = true;  // for which NCCL has none
  Expect(kCopy, call);

  Expect(kSum, Works(4));
  Expect(kNccl, Works(5));
  CallFacts staged = Works();
  staged.is_staged = true;
  Expect(kSum, staged);
  staged.is_start = true;
  Expect(kNccl, staged);
  staged.is_staged = false;
  Expect(kSum, staged);
  // What copies are too small for, kernels may do.
  call = Moves(kLeastCopiedBytes - 1);
  call.works = 1;
  Expect(kSum, call);
  Expect(kSum, call, kAny, kProcesses);
  ++call.bytes_sent;
  Expect(kCopy, call);
  // Numbers are not used again.
  Expect(kSum, Works(), kAny, {true, false, true, kFlagsOfCall});
  Expect(kNccl, Works(), kAny, {true, false, true, kFlagsOfCall - 1});

  Expect(kNccl, Moves(), {false, true});
  Expect(kNccl, Works(), {true, false});
  Expect(kNccl, Moves(), kAny, {false, false, true, ~uint32_t{0}});
  Expect(kNccl, Works(), kAny, {true, false, false, ~uint32_t{0}});
  for (CallFacts each : {Moves(), Works()}) {
    each.may_be_captured = true;
    Expect(kNccl, each);
    each.may_be_captured = false;
    each.size = 1;
    Expect(kNccl, each);
  }
  CallFacts neither;
  neither.size = 2;
  Expect(kNccl, neither);
}

int windows = 0;  // that NCCL has given and not taken back

char* Segment(uint64_t number) {
  return reinterpret_cast<char*>(uintptr_t{number} * 4 * kMiB);
}

// Gives windows for even segments only.
NcclLibrary Nccl() {
  NcclLibrary library;
  library.nccl.CommWindowRegister = [](nccl::Comm, void* data, size_t,
                                       nccl::Window* window, int) {
    const bool even = reinterpret_cast<uintptr_t>(data) / (4 * kMiB) % 2 == 0;
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

TEST(whole_ranges_of_registered_segments_are_covered) {
  const NcclLibrary library = Nccl();
  const auto comm = reinterpret_cast<nccl::Comm>(const_cast<NcclLibrary*>(&library));
  Windows registered;
  const auto add = [&](uint64_t segment) {
    Status status = registered.Begin(library, comm, Segment(segment), kMiB, segment);
    return registered.Finish(library, comm, segment, status);
  };
  for (const uint64_t segment : {2, 4}) {
    CHECK_EQ(add(segment), std::string("window"));
    CHECK_TRUE(registered.Cover(Segment(segment), kMiB));
    CHECK_TRUE(registered.Cover(Segment(segment) + kMiB - 1, 1));
    CHECK_TRUE(!registered.Cover(Segment(segment) + 1, kMiB));
    CHECK_TRUE(!registered.Cover(Segment(segment) - 1, 1));
  }
  // What gets no window is not covered.
  CHECK_EQ(add(3), std::string("NCCL gave no window"));
  CHECK_TRUE(registered.How(3) == nullptr);
  CHECK_TRUE(!registered.Cover(Segment(3), 1));
  registered.Remove(library, comm, 2);
  CHECK_TRUE(!registered.Cover(Segment(2), 1));
  CHECK_TRUE(registered.Cover(Segment(4), 1));
  CHECK_EQ(windows, 1);
  registered.RemoveAll(library, comm);
  CHECK_EQ(windows, 0);
}

TEST(a_window_that_comes_too_late_is_taken_for_no_other) {
  static std::vector<nccl::Window*> targets;
  NcclLibrary library = Nccl();
  library.nccl.CommWindowRegister = [](nccl::Comm, void*, size_t, nccl::Window* window,
                                       int) {
    targets.push_back(window);
    return nccl::kSuccess;
  };
  Windows registered;
  CHECK_OK(registered.Begin(library, nullptr, Segment(2), kMiB, 2));
  const Status late = FailedPrecondition("not done after 1 s");
  CHECK_EQ(registered.Finish(library, nullptr, 2, late), "not done after 1 s");
  CHECK_OK(registered.Begin(library, nullptr, Segment(4), kMiB, 4));
  *targets[0] = reinterpret_cast<nccl::Window>(1);  // NCCL, on a thread of its own
  CHECK_EQ(registered.Finish(library, nullptr, 4, OkStatus()), "NCCL gave no window");
  CHECK_TRUE(registered.empty());
}

}  // namespace
}  // namespace jaxcomm::testing
