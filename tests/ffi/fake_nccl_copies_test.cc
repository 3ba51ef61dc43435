// Collectives that copy engines do, between devices of one process.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"
#include "tests/ffi/check.h"
#include "tests/ffi/copies.h"
#include "tests/ffi/fake_library.h"
#include "tests/ffi/fake_nccl.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

TEST(a_start_waits_for_operands_and_targets_and_a_done_for_copies) {
  auto communicator = Make(2);
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get()), second(1, site.get());
  Gate operand;  // of the first, which the stream has yet to compute
  TheFake().cuda.LaunchHostFunc(first.on.stream, &Gate::Wait, &operand);
  TheFake().cuda.LaunchHostFunc(
      first.on.stream, [](void* to) { *static_cast<float*>(to) = 41; },
      first.operand.data());
  TheFake().clear_trace();
  for (Part* part : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueStart(part->CallOf(), part->on.stream).success());
  }
  for (Part* part : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueDone(part->CallOf(), part->on.stream).success());
  }
  std::atomic<bool> is_over{false};
  TheFake().cuda.LaunchHostFunc(
      second.on.stream,
      [](void* over) { *static_cast<std::atomic<bool>*>(over) = true; }, &is_over);
  CHECK_EQ(Count("cuStreamSynchronize"), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_TRUE(!is_over);
  // The program may still use the first's result: nothing was written there.
  CHECK_EQ(first.result[0], -1.0f);
  CHECK_EQ(communicator->stats().in_flight, 2);
  operand.open = true;
  first.on.Synchronize();
  second.on.Synchronize();
  CHECK_EQ(second.result[0], 41.0f);
  CHECK_TRUE(Holds(second, 0, first, 0, kMany));
  CHECK_TRUE(Holds(first, 0, second, 0, kMany));
  CHECK_EQ(Count("cuMemcpyDtoDAsync_v2"), 2);
  CHECK_EQ(Count("ncclSend"), 0);
  CHECK_EQ(NcclStatsOf(*communicator).copied_calls, 1);
  CHECK_EQ(communicator->stats().bytes, 2 * 4 * kMany);
  while (communicator->stats().in_flight > 0) std::this_thread::yield();
}

TEST(a_whole_collective_is_given_to_the_stream_of_its_call_alone) {
  auto communicator = Make(2);
  const auto site = Site("permute", {1, 0});
  std::vector<std::unique_ptr<Part>> parts;
  TheFake().clear_trace();
  ForAll(
      2, site.get(),
      [&](Part& part) {
        // The first comes when the other waits.
        if (part.device == 0) {
          CHECK_TRUE(Comes([&] { return communicator->stats().in_flight > 0; }));
        }
        CHECK_TRUE(communicator->Enqueue(part.CallOf(), part.on.stream).success());
      },
      &parts);
  CHECK_TRUE(Holds(*parts[0], 0, *parts[1], 0, kMany));
  CHECK_TRUE(Holds(*parts[1], 0, *parts[0], 0, kMany));
  CHECK_EQ(Count("cuMemcpyDtoDAsync_v2"), 2);
  for (const auto& part : parts) {
    const std::string copied =
        StrCat("\"stream\": ", reinterpret_cast<uintptr_t>(part->on.stream));
    CHECK_CONTAINS(std::string(TheFake().trace()), copied);
  }
  CHECK_EQ(Count("cuEventSynchronize") + Count("cuEventCreate"), 4);
}

TEST(what_moves_bytes_is_copied_as_nccl_would) {
  auto communicator = Make(3);
  std::vector<std::unique_ptr<Part>> parts;
  const auto run = [&](CallSite* site) {
    TheFake().clear_trace();
    ForAll(
        3, site,
        [&](Part& part) {
          CHECK_TRUE(communicator->Enqueue(part.CallOf(), part.on.stream).success());
        },
        &parts);
    CHECK_EQ(Count("ncclSend") + Count("ncclAllGather") + Count("ncclAlltoAll"), 0);
  };
  // Rank 1 sends to 0 alone, and 2 keeps its own: nobody sends to 1.
  const auto permute = Site("permute", {1, -1, 2});
  run(permute.get());
  CHECK_TRUE(Holds(*parts[0], 0, *parts[1], 0, kMany));
  CHECK_TRUE(parts[1]->result == std::vector<float>(kMany, 0.0f));
  CHECK_TRUE(Holds(*parts[2], 0, *parts[2], 0, kMany));

  const auto gather = Site("all_gather", {1}, 3 * kMany);
  run(gather.get());
  for (int rank = 0; rank < 3; ++rank) {
    for (int of = 0; of < 3; ++of) {
      CHECK_TRUE(Holds(*parts[rank], of * kMany, *parts[of], 0, kMany));
    }
  }
  const int64_t piece = kMany / 2;
  const auto exchange = Site("all_to_all", {1, 1, 0}, 3 * piece, 3 * piece);
  run(exchange.get());
  for (int rank = 0; rank < 3; ++rank) {
    for (int of = 0; of < 3; ++of) {
      CHECK_TRUE(Holds(*parts[rank], of * piece, *parts[of], rank * piece, piece));
    }
  }
  CHECK_EQ(NcclStatsOf(*communicator).copied_calls, 3);
}

TEST(groups_meet_by_themselves) {
  auto communicator = Make(4, 30, Library(), {{100, 103}, {102, 101}});
  const auto site = Site("permute", {1, 0});
  std::vector<std::unique_ptr<Part>> parts;
  ForAll(
      4, site.get(),
      [&](Part& part) {
        CHECK_TRUE(communicator->Enqueue(part.CallOf(), part.on.stream).success());
      },
      &parts);
  const int partner[] = {3, 2, 1, 0};
  for (int rank = 0; rank < 4; ++rank) {
    CHECK_TRUE(Holds(*parts[rank], 0, *parts[partner[rank]], 0, kMany));
  }
}

TEST(the_turns_of_a_loop_do_not_mix_and_make_no_events_once_warm) {
  auto communicator = Make(3);
  const auto site = Site("permute", {2, 0, 1});
  std::atomic<int> warm{0};
  ForAll(3, site.get(), [&](Part& part) {
    for (int turn = 0; turn < 15; ++turn) {
      part.on.Synchronize();
      part.operand[0] = static_cast<float>(100 * turn + part.device);
      // One rank runs ahead of another by what the permutation lets it.
      if (turn % 3 == part.device) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      CHECK_TRUE(communicator->EnqueueStart(part.CallOf(), part.on.stream).success());
      CHECK_TRUE(communicator->EnqueueDone(part.CallOf(), part.on.stream).success());
      part.on.Synchronize();
      CHECK_EQ(part.result[0], static_cast<float>(100 * turn + (part.device + 2) % 3));
      if (turn == 5 && ++warm == 3) TheFake().clear_trace();
    }
  });
  // Not in each turn: at most as many as two ranks that are ahead need once.
  CHECK_TRUE(Count("cuEventCreate") <= 2 * 6);
  TheFake().clear_trace();
  communicator->Abort(FailedPrecondition("closed"));
  communicator.reset();
  CHECK_EQ(Count("cuStreamDestroy_v2"), 6);
  CHECK_TRUE(Count("cuEventDestroy_v2") >= 3 * (2 * 2 * 64 + 2));
}

TEST(a_start_without_its_done_is_over_at_the_next) {
  auto communicator = Make(2);
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get()), second(1, site.get());
  for (int64_t run = 1; run < 4; ++run) {
    first.operand[0] = second.operand[0] = static_cast<float>(run);
    for (Part* part : {&first, &second}) {
      CHECK_TRUE(
          communicator->EnqueueStart(part->CallOf(run), part->on.stream).success());
    }
    while (communicator->stats().in_flight > 0) std::this_thread::yield();
  }
  for (Part* part : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueDone(part->CallOf(), part->on.stream).success());
    part->on.Synchronize();
    CHECK_EQ(part->result[0], 3.0f);
    CHECK_CONTAINS(
        std::string(
            communicator->EnqueueDone(part->CallOf(), part->on.stream).message()),
        "no collective was begun");
  }
}

TEST(nccl_does_what_is_small_reduced_in_many_rows_or_out_of_reach) {
  const auto sends = [](Communicator& communicator, CallSite* site) {
    ForAll(2, site, [&](Part& part) {
      CHECK_TRUE(communicator.Enqueue(part.CallOf(), part.on.stream).success());
    });
    return NcclStatsOf(communicator).copied_calls;
  };
  auto communicator = Make(2);
  CHECK_EQ(sends(*communicator, Site("permute", {1, 0}, 4096, 4096).get()), 0);
  CHECK_EQ(sends(*communicator, Site("all_reduce", {}).get()), 0);
  // Half of it stays.
  CHECK_EQ(sends(*communicator, Site("all_to_all", {1, 1, 0}).get()), 0);
  // 64 rows of half a MiB each.
  CHECK_EQ(sends(*communicator, Site("all_gather", {64}, 2 * kMany).get()), 0);
  CHECK_EQ(sends(*communicator, Site("all_gather", {4}, 2 * kMany).get()), 1);

  static NcclLibrary apart = MakeLibrary();
  apart.cuda.DeviceCanAccessPeer = [](int* can, cuda::Device, cuda::Device) {
    *can = 0;
    return cuda::kSuccess;
  };
  auto others = Make(2, 30, apart);
  CHECK_EQ(sends(*others, Site("permute", {1, 0}).get()), 0);
}

TEST(nccl_does_what_lies_in_symmetric_memory_but_sends_along_pairs) {
  auto communicator = Make(2);
  auto& nccl = dynamic_cast<NcclCommunicator&>(*communicator);
  const auto memory = Must(SymmetricMemory::Create(Library(), {0, 1}, 12 * kMany));
  Must(nccl.Register(memory));
  const auto in_pool = [&](CallSite* site) {
    ForAll(2, site, [&](Part& part) {
      auto* const block = static_cast<float*>(memory->data(part.device));
      std::fill_n(block, kMany, 7.0f * part.device);
      part.operands[0] = block;
      part.results[0] = block + kMany;
      CHECK_TRUE(communicator->Enqueue(part.CallOf(), part.on.stream).success());
    });
  };
  in_pool(Site("all_gather", {1}, 2 * kMany).get());
  CHECK_EQ(NcclStatsOf(*communicator).copied_calls, 0);
  CHECK_EQ(NcclStatsOf(*communicator).symmetric_calls, 1);
  in_pool(Site("permute", {1, 0}).get());
  CHECK_EQ(NcclStatsOf(*communicator).copied_calls, 1);
  CHECK_EQ(NcclStatsOf(*communicator).symmetric_calls, 1);
  for (int rank = 0; rank < 2; ++rank) {
    const auto* const sent = static_cast<float*>(memory->data(rank)) + kMany;
    CHECK_EQ(sent[kMany - 1], 7.0f * (1 - rank));
  }
}

// Real NCCL hangs there; the stand-in does not mind.
TEST(what_is_sent_lies_in_symmetric_memory_at_both_ends_or_none) {
  static NcclLibrary library = Library();
  library.test_double = nullptr;
  auto communicator = Make(2, 30, library);
  auto& nccl = dynamic_cast<NcclCommunicator&>(*communicator);
  const auto memory = Must(SymmetricMemory::Create(Library(), {0, 1}, 1 << 16));
  Must(nccl.Register(memory));
  const auto sent = [&](CallSite* site, bool from_pool, bool to_pool) {
    std::string said;
    ForAll(2, site, [&](Part& part) {
      auto* const block = static_cast<float*>(memory->data(part.device));
      if (from_pool) part.operands[0] = block;
      if (to_pool) part.results[0] = block + 1024;
      const Status status = communicator->Enqueue(part.CallOf(), part.on.stream);
      if (part.device == 0) said = std::string(status.message());
    });
    return said;
  };
  const auto hop = MakeSite("permute", {1, 0}, {FloatLeaf(8)}, {FloatLeaf(8)});
  const auto exchange =
      MakeSite("all_to_all", {1, 1, 0}, {FloatLeaf(8)}, {FloatLeaf(8)});
  const auto sum = MakeSite("all_reduce", {}, {FloatLeaf(8)}, {FloatLeaf(8)});
  for (CallSite* site : {hop.get(), exchange.get()}) {
    CHECK_EQ(sent(site, true, true), "");
    CHECK_EQ(sent(site, false, false), "");
    CHECK_CONTAINS(sent(site, true, false),
                   "its operand lies in a SymmetricPool and its result does not");
    CHECK_CONTAINS(sent(site, false, true), "hand in an array of the pool");
    CHECK_EQ(sent(site, true, true), "");
  }
  CHECK_EQ(sent(sum.get(), true, false), "");
}

TEST(a_suspended_communicator_copies_nothing) {
  auto communicator = Make(2);
  auto& nccl = dynamic_cast<NcclCommunicator&>(*communicator);
  CHECK_TRUE(nccl.SetSuspended(true).success());
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get());
  CHECK_CONTAINS(
      std::string(communicator->Enqueue(first.CallOf(), first.on.stream).message()),
      "the communicator is suspended");
}

}  // namespace
}  // namespace jaxcomm::testing
