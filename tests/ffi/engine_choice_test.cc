// Tests the whole table of engines, and that each reason fits.
#include "ffi/backends/nccl/engine_choice.h"

#include <cstdint>
#include <string>
#include <vector>

#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

constexpr int64_t kMiB = 1 << 20;

CallFacts Moves(int64_t bytes_sent = kLeastCopiedBytes, int64_t copies = 1) {
  CallFacts call;
  call.size = 2;
  call.only_moves = true;
  call.bytes_sent = bytes_sent;
  call.copies = copies;
  return call;
}

CallFacts Sums(int sums = 1, int64_t words = 1, int size = 2) {
  CallFacts call;
  call.size = size;
  call.sums = sums;
  call.words_of_largest_sum = words;
  return call;
}

// A node where every engine is there, and a policy that leaves all to jaxcomm.
const EnginePolicy kAny{true, true};
const EngineTopology kNode{true, true, 1000};

void Expect(EngineKind kind, const std::string& reason, const CallFacts& call,
            const EnginePolicy& policy = kAny, const EngineTopology& topology = kNode) {
  const EngineChoice choice = Choose(call, policy, topology);
  CHECK_EQ(EngineName(choice.kind), std::string(EngineName(kind)));
  CHECK_CONTAINS(std::string(choice.reason), reason);
}

TEST(copy_engines_do_large_moves) {
  Expect(EngineKind::kCopy, "only moves bytes", Moves());
  Expect(EngineKind::kCopy, "only moves bytes", Moves(256 * kMiB, 256));
  Expect(EngineKind::kNccl, "no rank sends 32 MiB", Moves(kLeastCopiedBytes - 1));
  Expect(EngineKind::kNccl, "less than 1 MiB on average", Moves(256 * kMiB, 257));
}

TEST(nccl_keeps_symmetric_memory_but_for_sends_along_pairs) {
  CallFacts call = Moves();
  call.is_symmetric = true;
  Expect(EngineKind::kNccl, "symmetric memory", call);
  call.moves_along_pairs = true;
  Expect(EngineKind::kCopy, "only moves bytes", call);
}

TEST(our_kernel_adds_a_few_small_arrays) {
  for (const int size : {2, 3, 8}) {
    const int64_t most = (size == 2 ? 2048 : 512) * 1024 / 4 / size;
    CHECK_EQ(MostWordsOfSum(size), most);
    Expect(EngineKind::kOneShot, "a small sum", Sums(1, most, size));
    Expect(EngineKind::kNccl, "more bytes than an inbox", Sums(1, most + 1, size));
  }
  Expect(EngineKind::kOneShot, "a small sum", Sums(4));
  Expect(EngineKind::kNccl, "more than 4 arrays", Sums(5));
}

TEST(numbers_of_sums_are_not_used_again) {
  Expect(EngineKind::kOneShot, "a small sum", Sums(), kAny, {true, true, 4});
  Expect(EngineKind::kNccl, "used up", Sums(), kAny, {true, true, 3});
}

TEST(the_policy_overrides) {
  Expect(EngineKind::kNccl, "policy", Moves(), {false, true});
  Expect(EngineKind::kNccl, "policy", Sums(), {true, false});
  // Each fact rules out one engine alone.
  Expect(EngineKind::kCopy, "only moves bytes", Moves(), {true, false});
  Expect(EngineKind::kOneShot, "a small sum", Sums(), {false, true});
}

TEST(the_topology_rules_engines_out) {
  Expect(EngineKind::kNccl, "of one process", Moves(), kAny, {false, true, 1000});
  Expect(EngineKind::kNccl, "take part", Sums(), kAny, {true, false, 1000});
}

TEST(nccl_does_all_else) {
  CallFacts call;
  call.size = 2;
  Expect(EngineKind::kNccl, "neither moves alone nor sums", call);
  for (CallFacts each : {Moves(), Sums()}) {
    each.may_be_captured = true;
    Expect(EngineKind::kNccl, "CUDA graph", each);
    each.may_be_captured = false;
    each.size = 1;
    Expect(EngineKind::kNccl, "one rank", each);
  }
  call = Moves();
  call.may_wait = false;
  Expect(EngineKind::kNccl, "may not wait", call);
}

// Every combination of facts: an engine is never chosen against a single fact that
// rules it out, and always without one.
TEST(the_whole_table) {
  int seen[3] = {};
  for (unsigned bits = 0; bits < 1 << 13; ++bits) {
    const auto is = [&](int bit) { return (bits >> bit & 1) != 0; };
    CallFacts call;
    call.size = is(0) ? 4 : 1;
    call.only_moves = is(1);
    call.moves_along_pairs = is(2);
    call.bytes_sent = is(3) ? 64 * kMiB : kMiB;
    call.copies = is(4) ? 1 : 100;
    call.sums = is(1) || is(5) ? 0 : 1;
    call.words_of_largest_sum = is(6) ? 1 : 1 << 20;
    call.is_symmetric = is(7);
    call.may_be_captured = is(8);
    call.may_wait = is(9);
    const EnginePolicy policy{is(10), is(11)};
    const EngineTopology topology{is(12), is(12), is(12) ? 8u : 0u};
    const bool copies = is(0) && is(1) && is(3) && is(4) && (is(2) || !is(7)) &&
                        !is(8) && is(9) && is(10) && is(12);
    const bool adds = is(0) && !is(1) && !is(5) && is(6) && !is(8) && is(11) && is(12);
    const EngineChoice choice = Choose(call, policy, topology);
    const EngineKind expected = copies ? EngineKind::kCopy
                                : adds ? EngineKind::kOneShot
                                       : EngineKind::kNccl;
    CHECK_TRUE(choice.kind == expected);
    CHECK_TRUE(choice.reason[0] != '\0');
    ++seen[static_cast<int>(choice.kind)];
  }
  for (const int times : seen) CHECK_TRUE(times > 0);
}

}  // namespace
}  // namespace jaxcomm::testing
