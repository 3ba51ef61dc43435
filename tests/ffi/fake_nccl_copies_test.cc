// Collectives that copy engines do, between devices of one process.

#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

int64_t CopiedCalls(Communicator& communicator) {
  return NcclStatsOf(communicator).copied_calls;
}

TEST(a_start_waits_for_operands_and_targets_and_a_done_for_copies) {
  auto communicator = MakeCopying();
  const auto site = Swap();
  Two two(site.get());
  Part &first = two.first, &second = two.second;
  Gate operand;  // of the first, which the stream has yet to compute
  operand.Hold(first.on.stream);
  Cuda().LaunchHostFunc(
      first.on.stream, [](void* to) { *static_cast<float*>(to) = 41; },
      first.operand.data());
  TheFake().clear_trace();
  two.Start(*communicator);
  two.Done(*communicator);
  const Milestone over(second.on.stream);
  CHECK_EQ(Count("cuStreamSynchronize"), 0);
  LetOthersRun();
  CHECK_TRUE(!over.passed());
  // The program may still use the first's result: nothing was written there.
  CHECK_EQ(first.result[0], -1.0f);
  CHECK_EQ(communicator->stats().in_flight, 2);
  operand.Open();
  two.Synchronize();
  CHECK_EQ(second.result[0], 41.0f);
  CHECK_TRUE(Holds(second, 0, first, 0, kMany));
  CHECK_TRUE(Holds(first, 0, second, 0, kMany));
  CHECK_EQ(Count("cuMemcpyDtoDAsync_v2"), 2);
  CHECK_EQ(Count("ncclSend"), 0);
  CHECK_EQ(CopiedCalls(*communicator), 1);
  CHECK_EQ(communicator->stats().bytes, 2 * 4 * kMany);
  CHECK_TRUE(Until([&] { return IsIdle(*communicator); }));
}

// A copy within a GPU waits for the work beside a start, and others would wait with it.
TEST(a_start_copies_to_others_before_it_copies_within_its_device) {
  static std::vector<std::pair<cuda::Pointer, cuda::Pointer>> copies;
  NcclLibrary library = Library();
  library.cuda.MemcpyDtoDAsync = [](cuda::Pointer to, cuda::Pointer from, size_t bytes,
                                    cuda::Stream stream) {
    copies.emplace_back(to, from);
    return Cuda().MemcpyDtoDAsync(to, from, bytes, stream);
  };
  auto communicator = MakeCopying(kHangSeconds, 2, library);
  const auto gather = FloatSite("all_gather", {1}, kMany / 4, kMany / 2);
  Two two(gather.get());
  copies.clear();
  two.Start(*communicator);
  two.Done(*communicator);
  two.Synchronize();
  CHECK_EQ(copies.size(), size_t{4});
  const auto begin = [](const auto& floats) {
    return reinterpret_cast<cuda::Pointer>(floats.data());
  };
  for (const Part* part : {&two.first, &two.second}) {
    const cuda::Pointer of_result = begin(part->result);
    const bool is_other = copies[0].second != begin(part->operand);
    const size_t first = is_other ? 2 : 0;
    for (const size_t i : {first, first + 1}) {
      CHECK_EQ(copies[i].second, begin(part->operand));
      const bool is_within =
          copies[i].first >= of_result &&
          copies[i].first < of_result + part->result.size() * sizeof(float);
      CHECK_EQ(is_within, i == first + 1);
    }
    CHECK_TRUE(Holds(*part, 0, two.first, 0, kMany / 4));
    CHECK_TRUE(Holds(*part, kMany / 4, two.second, 0, kMany / 4));
  }
}

TEST(a_whole_collective_is_given_to_the_stream_of_its_call_alone) {
  auto communicator = MakeCopying();
  const auto site = Swap();
  TheFake().clear_trace();
  const Parts parts = ForParts(2, site.get(), [&](Part& part) {
    // The first comes when the other waits.
    if (part.device == 0) CHECK_TRUE(Until([&] { return !IsIdle(*communicator); }));
    CHECK_OK(part.Enqueue(*communicator));
  });
  CHECK_TRUE(Holds(*parts[0], 0, *parts[1], 0, kMany));
  CHECK_TRUE(Holds(*parts[1], 0, *parts[0], 0, kMany));
  CHECK_EQ(Count("cuMemcpyDtoDAsync_v2"), 2);
  for (const auto& part : parts) {
    CHECK_CONTAINS(
        std::string(TheFake().trace()),
        StrCat("\"stream\": ", reinterpret_cast<uintptr_t>(part->on.stream)));
  }
  CHECK_EQ(Count("cuEventSynchronize") + Count("cuEventCreate"), 6);
}

TEST(what_moves_bytes_is_copied_as_nccl_would) {
  auto communicator = MakeCopying(kHangSeconds, 3);
  const auto run = [&](CallSite* site) {
    TheFake().clear_trace();
    Parts parts = EnqueueAll(*communicator, 3, site);
    CHECK_EQ(Count("ncclSend") + Count("ncclAllGather") + Count("ncclAlltoAll"), 0);
    return parts;
  };
  // Rank 1 sends to 0 alone, and 2 keeps its own: nobody sends to 1.
  const auto permute = FloatSite("permute", {1, -1, 2}, kMany);
  const Parts moved = run(permute.get());
  CHECK_TRUE(Holds(*moved[0], 0, *moved[1], 0, kMany));
  CHECK_TRUE(moved[1]->result == std::vector<float>(kMany, 0.0f));
  CHECK_TRUE(Holds(*moved[2], 0, *moved[2], 0, kMany));

  const int64_t piece = kMany / 2;
  const auto gather = FloatSite("all_gather", {1}, kMany, 3 * kMany);
  const auto exchange = FloatSite("all_to_all", {1, 1, 0}, 3 * piece);
  const Parts gathered = run(gather.get()), exchanged = run(exchange.get());
  for (int rank = 0; rank < 3; ++rank) {
    for (int of = 0; of < 3; ++of) {
      CHECK_TRUE(Holds(*gathered[rank], of * kMany, *gathered[of], 0, kMany));
      CHECK_TRUE(
          Holds(*exchanged[rank], of * piece, *exchanged[of], rank * piece, piece));
    }
  }
  CHECK_EQ(CopiedCalls(*communicator), 3);
}

// The second group also where its devices do not reach each other: NCCL serves it.
TEST(groups_meet_by_themselves) {
  Options options, apart;
  options.size = 4;
  options.copies = true;
  options.groups = {{100, 103}, {102, 101}};
  apart = options;
  apart.library.cuda.DeviceCanAccessPeer = [](int* can, cuda::Device from,
                                              cuda::Device) {
    *can = from == 0 || from == 3;
    return cuda::kSuccess;
  };
  for (const Options& each : {options, apart}) {
    auto communicator = Make(each);
    TheFake().clear_trace();
    const auto site = Swap();
    const Parts parts = EnqueueAll(*communicator, 4, site.get());
    for (int rank = 0; rank < 4; ++rank) {
      CHECK_TRUE(Holds(*parts[rank], 0, *parts[3 - rank], 0, kMany));
    }
    const bool all_copy = NcclStatsOf(*communicator).copies == "yes";
    CHECK_EQ(CopiedCalls(*communicator), 1);
    CHECK_EQ(Count("cuMemcpyDtoDAsync_v2"), all_copy ? 4 : 2);
    CHECK_EQ(Count("ncclSend"), all_copy ? 0 : 2);
  }
}

TEST(the_turns_of_a_loop_do_not_mix_and_make_no_events_once_warm) {
  auto communicator = MakeCopying(kHangSeconds, 3);
  const auto site = FloatSite("permute", {2, 0, 1}, kMany);
  std::atomic<int> warm{0};
  ForParts(3, site.get(), [&](Part& part) {
    for (int turn = 0; turn < 12; ++turn) {
      part.on.Synchronize();
      part.operand[0] = static_cast<float>(100 * turn + part.device);
      // One rank runs ahead of another by what the permutation lets it.
      if (turn % 3 == part.device) LetOthersRun();
      CHECK_OK(part.Start(*communicator));
      CHECK_OK(part.Done(*communicator));
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

TEST(nccl_does_what_is_small_reduced_or_out_of_reach) {
  const auto copied = [](Communicator& communicator, const std::string& collective,
                         std::vector<int64_t> params, int64_t operand = kMany,
                         int64_t result = -1) {
    const auto site = FloatSite(collective, std::move(params), operand, result);
    EnqueueAll(communicator, 2, site.get());
    return CopiedCalls(communicator);
  };
  auto communicator = MakeCopying();
  CHECK_EQ(copied(*communicator, "permute", {1, 0}, 4096), 0);
  CHECK_EQ(copied(*communicator, "all_reduce", {}), 0);
  CHECK_EQ(copied(*communicator, "all_to_all", {1, 1, 0}), 0);  // half of it stays
  CHECK_EQ(copied(*communicator, "all_gather", {kMany / 128}, kMany, 2 * kMany), 1);

  NcclLibrary apart = Library();
  apart.cuda.DeviceCanAccessPeer = [](int* can, cuda::Device, cuda::Device) {
    *can = 0;
    return cuda::kSuccess;
  };
  CHECK_EQ(copied(*MakeCopying(kHangSeconds, 2, apart), "permute", {1, 0}), 0);
}

TEST(nccl_does_what_lies_in_symmetric_memory_but_sends_along_pairs) {
  auto communicator = MakeCopying();
  const auto memory = Must(SymmetricMemory::Create(Library(), {0, 1}, 12 * kMany));
  Must(NcclOf(*communicator).Register(memory));
  const auto in_pool = [&](std::unique_ptr<CallSite> site) {
    ForParts(2, site.get(), [&](Part& part) {
      auto* const block = static_cast<float*>(memory->data(part.device));
      std::fill_n(block, kMany, 7.0f * part.device);
      part.operands[0] = block;
      part.results[0] = block + kMany;
      CHECK_OK(part.Enqueue(*communicator));
    });
    CHECK_EQ(NcclStatsOf(*communicator).symmetric_calls, 1);
  };
  in_pool(FloatSite("all_gather", {1}, kMany, 2 * kMany));
  CHECK_EQ(CopiedCalls(*communicator), 0);
  in_pool(Swap());
  CHECK_EQ(CopiedCalls(*communicator), 1);
  for (int rank = 0; rank < 2; ++rank) {
    const auto* const sent = static_cast<float*>(memory->data(rank)) + kMany;
    CHECK_EQ(sent[kMany - 1], 7.0f * (1 - rank));
  }
}

// Real NCCL hangs there; the stand-in does not mind.
TEST(what_is_sent_lies_in_symmetric_memory_at_both_ends_or_none) {
  auto communicator = MakeCopying();
  const auto memory = Must(SymmetricMemory::Create(Library(), {0, 1}, 1 << 16));
  Must(NcclOf(*communicator).Register(memory));
  const auto sent = [&](CallSite* site, bool from_pool, bool to_pool) {
    Status of_first = OkStatus();
    ForParts(2, site, [&](Part& part) {
      auto* const block = static_cast<float*>(memory->data(part.device));
      if (from_pool) part.operands[0] = block;
      if (to_pool) part.results[0] = block + 1024;
      const Status status = part.Enqueue(*communicator);
      if (part.device == 0) of_first = status;
    });
    return of_first;
  };
  const auto hop = FloatSite("permute", {1, 0}, 8);
  const auto exchange = FloatSite("all_to_all", {1, 1, 0}, 8);
  const auto sum = FloatSite("all_reduce", {}, 8);  // which NCCL adds anywhere
  int symmetric = 0;
  for (CallSite* site : {hop.get(), exchange.get(), sum.get()}) {
    for (const bool from_pool : {false, true}) {
      for (const bool to_pool : {false, true}) {
        const Status status = sent(site, from_pool, to_pool);
        if (from_pool == to_pool || site == sum.get()) {
          CHECK_OK(status);
          symmetric += from_pool && to_pool;
        } else {
          CHECK_FAILS(
              status,
              from_pool ? "its operand lies in a SymmetricPool and its result does not"
                        : "hand in an array of the pool");
        }
        CHECK_EQ(NcclStatsOf(*communicator).symmetric_calls, symmetric);
      }
    }
  }
}

}  // namespace
}  // namespace jaxcomm::testing
