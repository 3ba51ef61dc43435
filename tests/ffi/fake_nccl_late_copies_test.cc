// Copies where a rank is late, or never comes.
#include <algorithm>

#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

using State = FlightRecorder::State;

// Leaves to NCCL at once what a rank sends or receives that is yet to come.
std::shared_ptr<Communicator> MakeImpatient(int size = 2,
                                            const NcclLibrary& library = Library(),
                                            double patience = kAtOnce) {
  return MakeCopying(kHangSeconds, size, library, patience);
}

TEST(what_a_late_rank_sends_and_receives_is_left_to_nccl) {
  auto communicator = MakeImpatient(3);
  const auto gather = FloatSite("all_gather", {1}, kMany, 3 * kMany);
  for (const bool split_phase : {false, true}) {
    TheFake().clear_trace();
    const Parts parts = ForParts(3, gather.get(), [&](Part& part) {
      // A run waits for a late rank once. Its second operation does not wait.
      for (int turn = 0; turn < 2; ++turn) {
        if (part.device == 2) {
          CHECK_TRUE(Until([&] { return Count("ncclRecv") >= 6 * turn + 4; }));
        }
        part.operand[0] = static_cast<float>(10 * turn + part.device);
        const int64_t run = split_phase ? 2 : 1;
        CHECK_OK(split_phase ? part.Start(*communicator, run)
                             : part.Enqueue(*communicator, run));
        if (split_phase) CHECK_OK(part.Done(*communicator, run));
        part.on.Synchronize();
        for (int of = 0; of < 3; ++of) {
          CHECK_EQ(part.result[of * kMany], static_cast<float>(10 * turn + of));
        }
      }
    });
    for (const auto& part : parts) {
      for (int of = 0; of < 3; ++of) {
        CHECK_TRUE(Holds(*part, of * kMany, *parts[of], 0, kMany));
      }
    }
    // Between the two that came in time nothing could be copied either: each sends to
    // the third as well, and what a rank sends goes one way.
    CHECK_EQ(Count("ncclSend"), 12);
    CHECK_EQ(Count("ncclRecv"), 12);
  }
  CHECK_EQ(CountOf(*communicator, State::kFailed), 0);
  CHECK_TRUE(Until([&] { return IsIdle(*communicator); }));
}

TEST(what_is_not_for_the_late_rank_is_copied) {
  auto communicator = MakeImpatient(3);
  // 0 to 1, 1 to 2, and 2, which is late, to 0.
  const auto site = FloatSite("permute", {2, 0, 1}, kMany);
  Two two(site.get());
  Part &first = two.first, &second = two.second, third(2, site.get());
  TheFake().clear_trace();
  // Both have begun before one of them waits: they are in time for each other.
  two.Start(*communicator);
  two.Done(*communicator);
  CHECK_OK(third.Enqueue(*communicator));
  for (Part* part : {&first, &second, &third}) part->on.Synchronize();
  CHECK_TRUE(Holds(second, 0, first, 0, kMany));
  CHECK_TRUE(Holds(third, 0, second, 0, kMany));
  CHECK_TRUE(Holds(first, 0, third, 0, kMany));
  CHECK_EQ(Count("cuMemcpyDtoDAsync_v2"), 1);
  CHECK_EQ(Count("ncclSend"), 2);
}

TEST(rows_that_a_late_rank_sends_and_receives_are_packed_for_nccl) {
  constexpr int64_t kRows = 1024, kRow = kMany / kRows / 2;
  auto communicator = MakeImpatient();
  const Leaf leaf = FloatLeaf(kMany);
  for (const bool sends_rows : {true, false}) {
    const std::vector<int64_t> params = {1, kRows, sends_rows ? 0 : 1};
    const auto site = MakeSite("all_to_all", params, {leaf}, {leaf, leaf});
    for (const bool is_late : {false, true}) {
      Two two(site.get());
      TheFake().clear_trace();
      CHECK_OK(two.first.Start(*communicator, 1 + is_late));
      if (is_late) CHECK_OK(two.first.Done(*communicator, 1 + is_late));
      CHECK_OK(two.second.Enqueue(*communicator, 1 + is_late));
      if (!is_late) CHECK_OK(two.first.Done(*communicator, 1 + is_late));
      two.Synchronize();
      for (const Part* part : {&two.first, &two.second}) {
        for (const Part* of : {&two.first, &two.second}) {
          for (const int64_t row : {int64_t{0}, int64_t{17}, kRows - 1}) {
            const int64_t among =
                sends_rows ? 2 * row + part->device : part->device * kRows + row;
            const int64_t at =
                sends_rows ? of->device * kRows + row : 2 * row + of->device;
            CHECK_TRUE(Holds(*part, at * kRow, *of, among * kRow, kRow));
          }
        }
      }
      CHECK_EQ(Count("ncclSend"), is_late ? 2 : 0);
      // What a rank keeps, and what it sends, packs or unpacks.
      CHECK_EQ(Count("cuMemcpy2DAsync_v2"), 4);
    }
  }
}

// NCCL sends between registered places, or between others.
TEST(what_a_late_rank_leaves_to_nccl_lies_in_a_pool_at_both_ends_or_none) {
  auto communicator = MakeImpatient(2);
  const auto memory = Must(SymmetricMemory::Create(Library(), {0, 1}, 4 * kMany));
  Must(NcclOf(*communicator).Register(memory));
  const auto site = Swap();
  Two two(site.get());
  for (Part* part : {&two.first, &two.second}) {
    part->operands[0] = memory->data(part->device);
  }
  // In time, then late, then in time again.
  two.Start(*communicator, 1);
  two.Done(*communicator, 1);
  for (Part* part : {&two.first, &two.second}) {
    CHECK_FAILS(part->Enqueue(*communicator, 2), "its operand lies in a SymmetricPool");
  }
  two.Start(*communicator, 3);
  two.Done(*communicator, 3);
  two.Synchronize();
  CHECK_EQ(CountOf(*communicator, State::kFailed), 2);
  CHECK_TRUE(Until([&] { return IsIdle(*communicator); }));
}

TEST_ALONE(a_rank_that_does_not_come_ends_the_communicator_at_the_timeout,
           EXIT_SUCCESS) {
  auto communicator = MakeCopying(kExpires, 3);
  const auto site = FloatSite("permute", {2, 0, 1}, kMany);
  Part first(0, site.get()), second(1, site.get()), third(2, site.get());
  for (Part* part : {&first, &second}) {
    (void)part->Start(*communicator);
  }
  // Not late yet, for the second, and perhaps for the first.
  for (Part* part : {&second, &first}) (void)part->Done(*communicator);
  CHECK_TRUE(Until([&] { return third.Enqueue(*communicator, 2).failure(); }));
  CHECK_FAILS(third.Start(*communicator), "not done after 1 s");
  CHECK_FAILS(third.Enqueue(*communicator), "not done after 1 s");
  // The watch says how they ended after it has seen to it that calls are refused.
  CHECK_TRUE(Until([&] { return IsIdle(*communicator); }));
  CHECK_TRUE(Until([&] {
    const auto entries = communicator->recorder().Snapshot();
    return std::all_of(entries.begin(), entries.end(), [](const auto& entry) {
      // The bytes that the first rank sent may have arrived.
      return entry.state == State::kFailed ||
             (entry.rank == 0 && entry.state != State::kStarted);
    });
  }));
}

TEST_ALONE(a_run_waits_for_a_late_rank_once, EXIT_SUCCESS) {
  constexpr int kTurns = 10;
  auto communicator = MakeImpatient(2, Library(), kExpires);
  const auto site = Swap();
  Part first(0, site.get());
  const Stopwatch begin;
  CHECK_OK(first.Enqueue(*communicator));
  CHECK_TRUE(begin.seconds() >= kExpires);
  int fast = 0;
  for (int turn = 1; turn < kTurns; ++turn) {
    const Stopwatch of_turn;
    CHECK_OK(first.Enqueue(*communicator));
    fast += of_turn.seconds() < kExpires;
  }
  // One that waits takes at least so long, on any machine.
  CHECK_TRUE(fast > 0);
  // Nobody comes to what NCCL has. An error ends it; closing would wait for it.
  TheFake().fail("ncclSend", 0, nccl::kInternalError);
  CHECK_TRUE(first.Enqueue(*communicator).failure());
}

TEST(a_half_of_nccls_is_not_taken_for_one_of_copies_that_has_no_end) {
  auto communicator = MakeCopying();
  const auto large = Swap(), small = FloatSite("permute", {1, 0}, 16);
  Two two(large.get());
  two.Start(*communicator);
  // The program of these ranks failed. XLA gives their result's memory to another
  // program.
  CHECK_TRUE(Until([&] { return IsIdle(*communicator); }));
  Gate gate;
  gate.Hold(two.first.on.stream);
  for (Part* part : {&two.first, &two.second}) part->site = small.get();
  two.Start(*communicator, 2);
  two.Done(*communicator, 2);
  const Milestone over(two.second.on.stream);
  LetOthersRun();
  CHECK_TRUE(!over.passed());
  gate.Open();
  two.Synchronize();
}

TEST(who_drops_what_others_wait_for_in_nccl_ends_the_communicator) {
  auto communicator = MakeImpatient();
  const auto site = Swap();
  Two two(site.get());
  CHECK_OK(two.first.Enqueue(*communicator));
  CHECK_OK(two.second.Start(*communicator, 1));
  // The second's program fails there, and is run again: it must not meet with this.
  CHECK_FAILS(two.second.Start(*communicator, 2), "others wait for it in NCCL");
  CHECK_TRUE(two.first.Enqueue(*communicator, 2).failure());
}

TEST(first_leaves_without_elements_are_no_mark) {
  auto communicator = MakeCopying();
  std::unique_ptr<CallSite> sites[2];
  for (auto& site : sites) {
    site = MakeSite("permute", {1, 0}, {FloatLeaf(0), FloatLeaf(kMany)},
                    {FloatLeaf(0), FloatLeaf(kMany)});
  }
  ForRanks(2, [&](int device) {
    OnDevice on(device);
    std::vector<float> operand(kMany), result[2];
    const void* operands[2] = {nullptr, operand.data()};
    void* results[2][2];
    std::vector<Call> calls;
    operand[0] = static_cast<float>(device);
    for (int i = 0; i < 2; ++i) {
      result[i].assign(kMany, -1);
      results[i][0] = nullptr;
      results[i][1] = result[i].data();
      calls.push_back(Call{sites[i].get(), 1, static_cast<uint64_t>(i + 1), 1, device,
                           operands, results[i], nullptr});
      CHECK_OK(communicator->EnqueueStart(calls[i], on.stream));
    }
    for (const Call& call : calls) CHECK_OK(communicator->EnqueueDone(call, on.stream));
    on.Synchronize();
    for (const auto& each : result) CHECK_EQ(each[0], static_cast<float>(1 - device));
  });
}

}  // namespace
}  // namespace jaxcomm::testing
