// Copies where a rank is late, gone, or fails.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"
#include "ffi/backends/nccl/recipe.h"
#include "tests/ffi/check.h"
#include "tests/ffi/copies.h"
#include "tests/ffi/fake_library.h"
#include "tests/ffi/fake_nccl.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

// Soon leaves to NCCL what a rank sends or receives that is yet to come.
std::shared_ptr<Communicator> MakeImpatient(int size,
                                            const NcclLibrary& library = Library(),
                                            double patience_seconds = 0.1) {
  return Make(size, 30, library, {}, /*one_shot=*/false, OnFailure::kPoison,
              patience_seconds);
}

TEST(what_a_late_rank_sends_and_receives_is_left_to_nccl) {
  auto communicator = MakeImpatient(3);
  std::vector<std::unique_ptr<Part>> parts;
  for (const bool split_phase : {false, true}) {
    TheFake().clear_trace();
    const auto gather = Site("all_gather", {1}, 3 * kMany);
    ForAll(
        3, gather.get(),
        [&](Part& part) {
          // A run waits for a late rank once. Its second operation does not wait.
          for (int turn = 0; turn < 2; ++turn) {
            if (part.device == 2) {
              CHECK_TRUE(Comes([&] { return Count("ncclRecv") >= 6 * turn + 4; }));
            }
            part.operand[0] = static_cast<float>(10 * turn + part.device);
            const Call call = part.CallOf(split_phase ? 2 : 1);
            if (split_phase) {
              CHECK_TRUE(communicator->EnqueueStart(call, part.on.stream).success());
              CHECK_TRUE(communicator->EnqueueDone(call, part.on.stream).success());
            } else {
              CHECK_TRUE(communicator->Enqueue(call, part.on.stream).success());
            }
            part.on.Synchronize();
            for (int of = 0; of < 3; ++of) {
              CHECK_EQ(part.result[of * kMany], static_cast<float>(10 * turn + of));
            }
          }
        },
        &parts);
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
  for (const auto& entry : communicator->recorder().Snapshot()) {
    CHECK_TRUE(entry.state != FlightRecorder::State::kFailed);
  }
  CHECK_TRUE(Comes([&] { return communicator->stats().in_flight == 0; }));
}

TEST(what_is_not_for_the_late_rank_is_copied) {
  auto communicator = MakeImpatient(3);
  // 0 to 1, 1 to 2, and 2, which is late, to 0.
  const auto site = Site("permute", {2, 0, 1});
  Part first(0, site.get()), second(1, site.get()), third(2, site.get());
  TheFake().clear_trace();
  // Both have begun before one of them waits: they are in time for each other.
  for (Part* part : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueStart(part->CallOf(), part->on.stream).success());
  }
  for (Part* part : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueDone(part->CallOf(), part->on.stream).success());
  }
  CHECK_TRUE(communicator->Enqueue(third.CallOf(), third.on.stream).success());
  for (Part* part : {&first, &second, &third}) part->on.Synchronize();
  CHECK_TRUE(Holds(second, 0, first, 0, kMany));
  CHECK_TRUE(Holds(third, 0, second, 0, kMany));
  CHECK_TRUE(Holds(first, 0, third, 0, kMany));
  CHECK_EQ(Count("cuMemcpyDtoDAsync_v2"), 1);
  CHECK_EQ(Count("ncclSend"), 2);
}

// NCCL sends between registered places, or between others.
TEST(what_a_late_rank_leaves_to_nccl_lies_in_a_pool_at_both_ends_or_none) {
  static NcclLibrary library = MakeLibrary();
  library.test_double = nullptr;
  auto communicator = MakeImpatient(2, library);
  const auto memory = Must(SymmetricMemory::Create(library, {0, 1}, 4 * kMany));
  Must(dynamic_cast<NcclCommunicator&>(*communicator).Register(memory));
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get()), second(1, site.get());
  for (Part* part : {&first, &second}) part->operands[0] = memory->data(part->device);
  // In time, then late, then in time again.
  for (const int run : {1, 2, 3}) {
    if (run == 2) {
      for (Part* part : {&first, &second}) {
        const Status status = communicator->Enqueue(part->CallOf(run), part->on.stream);
        CHECK_CONTAINS(std::string(status.message()),
                       "its operand lies in a SymmetricPool");
      }
      continue;
    }
    for (Part* part : {&first, &second}) {
      CHECK_TRUE(
          communicator->EnqueueStart(part->CallOf(run), part->on.stream).success());
    }
    for (Part* part : {&first, &second}) {
      CHECK_TRUE(
          communicator->EnqueueDone(part->CallOf(run), part->on.stream).success());
    }
  }
  for (Part* part : {&first, &second}) part->on.Synchronize();
  int failed = 0;
  for (const auto& entry : communicator->recorder().Snapshot()) {
    failed += entry.state == FlightRecorder::State::kFailed;
  }
  CHECK_EQ(failed, 2);
  CHECK_TRUE(Comes([&] { return communicator->stats().in_flight == 0; }));
}

TEST(a_rank_that_does_not_come_ends_the_communicator_at_the_deadline) {
  auto communicator = Make(3, 0.2);
  const auto site = Site("permute", {2, 0, 1});
  Part first(0, site.get()), second(1, site.get());
  for (Part* part : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueStart(part->CallOf(), part->on.stream).success());
  }
  for (Part* part : {&second, &first}) {
    // Not late yet, for the second, and perhaps for the first.
    communicator->EnqueueDone(part->CallOf(), part->on.stream);
  }
  Part third(2, site.get());
  CHECK_TRUE(Comes([&] {
    return communicator->Enqueue(third.CallOf(2), third.on.stream).failure();
  }));
  for (const Status& status :
       {communicator->EnqueueStart(third.CallOf(), third.on.stream),
        communicator->Enqueue(third.CallOf(), third.on.stream)}) {
    CHECK_CONTAINS(std::string(status.message()), "not done after 0.2 s");
  }
  // The watch says how they ended after it has seen to it that calls are refused.
  CHECK_TRUE(Comes([&] { return communicator->stats().in_flight == 0; }));
  CHECK_TRUE(Comes([&] {
    const auto entries = communicator->recorder().Snapshot();
    return std::all_of(entries.begin(), entries.end(), [](const auto& entry) {
      // The bytes that the first rank sent may have arrived.
      return entry.state == FlightRecorder::State::kFailed ||
             (entry.rank == 0 && entry.state != FlightRecorder::State::kStarted);
    });
  }));
  for (Part* part : {&first, &second, &third}) part->on.Synchronize();
}

// Whether nothing is put into a rank's result that was told of a failure, once its own
// stream is done, which is when XLA gives the memory to somebody else.
void CheckNothingArrives(Part& sender, Part& told, Gate& gate) {
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    gate.open = true;
  });
  told.on.Synchronize();
  told.result[0] = 77;
  opens.join();
  sender.on.Synchronize();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK_EQ(told.result[0], 77.0f);
}

TEST(who_is_told_of_a_failure_waits_for_what_is_on_its_way) {
  auto communicator = Make(2, 0.3);
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get()), second(1, site.get());
  Gate gate;  // the first's GPU is busy
  TheFake().cuda.LaunchHostFunc(first.on.stream, &Gate::Wait, &gate);
  for (Part* part : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueStart(part->CallOf(), part->on.stream).success());
  }
  communicator->Abort(FailedPrecondition("closed"));
  CHECK_TRUE(communicator->EnqueueDone(second.CallOf(), second.on.stream).failure());
  CheckNothingArrives(first, second, gate);
}

TEST(who_fails_to_begin_waits_for_what_is_on_its_way) {
  auto communicator = Make(2);
  const auto site = Site("all_gather", {2}, 2 * kMany);
  Part first(0, site.get()), second(1, site.get());
  Gate gate;
  TheFake().cuda.LaunchHostFunc(first.on.stream, &Gate::Wait, &gate);
  CHECK_TRUE(communicator->EnqueueStart(first.CallOf(), first.on.stream).success());
  // Two rows of its own and two for the first; then as many of the first's, the last of
  // which is refused.
  TheFake().fail("cuMemcpyDtoDAsync_v2", 7, cuda::kInvalidValue);
  CHECK_TRUE(communicator->EnqueueStart(second.CallOf(), second.on.stream).failure());
  CheckNothingArrives(first, second, gate);
  CHECK_TRUE(communicator->EnqueueDone(first.CallOf(), first.on.stream).failure());
  first.on.Synchronize();
}

TEST(a_run_waits_for_a_late_rank_once) {
  constexpr int kTurns = 60;  // half a minute, if it waited in each
  auto communicator = MakeImpatient(2, Library(), /*patience_seconds=*/0.5);
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get());
  const auto begin = std::chrono::steady_clock::now();
  for (int turn = 0; turn < kTurns; ++turn) {
    CHECK_TRUE(communicator->Enqueue(first.CallOf(), first.on.stream).success());
  }
  CHECK_TRUE(std::chrono::steady_clock::now() - begin < std::chrono::seconds(15));
  // Nobody comes to what NCCL has. An error ends it; closing would wait for it.
  TheFake().fail("ncclSend", 0, nccl::kInternalError);
  CHECK_TRUE(communicator->Enqueue(first.CallOf(), first.on.stream).failure());
  first.on.Synchronize();
}

TEST(a_half_of_nccls_is_not_taken_for_one_of_copies_that_has_no_end) {
  auto communicator = Make(2);
  const auto large = Site("permute", {1, 0}), small = Site("permute", {1, 0}, 16, 16);
  Part first(0, large.get()), second(1, large.get());
  for (Part* part : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueStart(part->CallOf(), part->on.stream).success());
  }
  // The program of these ranks failed. XLA gives their result's memory to another
  // program.
  CHECK_TRUE(Comes([&] { return communicator->stats().in_flight == 0; }));
  Gate gate;
  TheFake().cuda.LaunchHostFunc(first.on.stream, &Gate::Wait, &gate);
  for (Part* part : {&first, &second}) {
    part->site = small.get();
    CHECK_TRUE(communicator->EnqueueStart(part->CallOf(2), part->on.stream).success());
  }
  for (Part* part : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueDone(part->CallOf(2), part->on.stream).success());
  }
  std::atomic<bool> is_over{false};
  TheFake().cuda.LaunchHostFunc(
      second.on.stream,
      [](void* over) { *static_cast<std::atomic<bool>*>(over) = true; }, &is_over);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_TRUE(!is_over);
  gate.open = true;
  for (Part* part : {&first, &second}) part->on.Synchronize();
}

TEST(who_drops_what_others_wait_for_in_nccl_ends_the_communicator) {
  auto communicator = MakeImpatient(2);
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get()), second(1, site.get());
  CHECK_TRUE(communicator->Enqueue(first.CallOf(), first.on.stream).success());
  CHECK_TRUE(communicator->EnqueueStart(second.CallOf(1), second.on.stream).success());
  // The second's program fails there, and is run again: it must not meet with this.
  CHECK_CONTAINS(
      std::string(
          communicator->EnqueueStart(second.CallOf(2), second.on.stream).message()),
      "others wait for it in NCCL");
  CHECK_TRUE(communicator->Enqueue(first.CallOf(2), first.on.stream).failure());
  for (Part* part : {&first, &second}) part->on.Synchronize();
}

TEST(nothing_is_sent_to_a_rank_that_went_on) {
  auto communicator = Make(2);
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get()), second(1, site.get());
  // The first's program failed after the start, and is run again.
  for (int64_t run : {1, 2}) {
    CHECK_TRUE(
        communicator->EnqueueStart(first.CallOf(run), first.on.stream).success());
  }
  TheFake().clear_trace();
  CHECK_CONTAINS(
      std::string(communicator->Enqueue(second.CallOf(1), second.on.stream).message()),
      "rank 1 of 2 (device 101): rank 0, whose program failed, went on without it");
  CHECK_EQ(Count("cuMemcpyDtoDAsync_v2"), 0);
  // The run after it is not concerned.
  CHECK_TRUE(communicator->Enqueue(second.CallOf(2), second.on.stream).success());
  CHECK_TRUE(communicator->EnqueueDone(first.CallOf(2), first.on.stream).success());
  for (Part* part : {&first, &second}) part->on.Synchronize();
  CHECK_TRUE(Holds(second, 0, first, 0, kMany));
}

TEST(first_leaves_without_elements_are_no_mark) {
  auto communicator = Make(2);
  std::unique_ptr<CallSite> sites[2];
  for (auto& site : sites) {
    site = MakeSite("permute", {1, 0}, {FloatLeaf(0), FloatLeaf(kMany)},
                    {FloatLeaf(0), FloatLeaf(kMany)});
  }
  const auto both = [&](int device) {
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
      CHECK_TRUE(communicator->EnqueueStart(calls[i], on.stream).success());
    }
    for (const Call& call : calls) {
      CHECK_TRUE(communicator->EnqueueDone(call, on.stream).success());
    }
    on.Synchronize();
    for (const auto& each : result) CHECK_EQ(each[0], static_cast<float>(1 - device));
  };
  std::thread other([&] { both(1); });
  both(0);
  other.join();
}

TEST(closing_ends_what_one_rank_alone_came_to) {
  auto communicator = Make(2, 0.5);
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get());
  CHECK_TRUE(communicator->EnqueueStart(first.CallOf(), first.on.stream).success());
  communicator->Abort(FailedPrecondition("closed by the test"));
  CHECK_CONTAINS(
      std::string(communicator->EnqueueDone(first.CallOf(), first.on.stream).message()),
      "closed by the test");
  for (const auto& entry : communicator->recorder().Snapshot()) {
    CHECK_TRUE(entry.state == FlightRecorder::State::kFailed);
  }
}

std::atomic<bool> queue_is_full{false};

TEST(closing_ends_what_the_driver_makes_wait) {
  static NcclLibrary library = MakeLibrary();
  library.cuda.MemcpyDtoDAsync = [](cuda::Pointer to, cuda::Pointer from, size_t bytes,
                                    cuda::Stream stream) {
    // A stream whose launch queue is full, behind an operation that hangs, blocks so.
    if (queue_is_full) CHECK_TRUE(Comes([] { return Count("ncclCommAbort") > 0; }));
    return TheFake().cuda.MemcpyDtoDAsync(to, from, bytes, stream);
  };
  auto communicator = Make(2, 0.2, library);
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get()), second(1, site.get());
  CHECK_TRUE(communicator->EnqueueStart(first.CallOf(), first.on.stream).success());
  TheFake().clear_trace();
  queue_is_full = true;
  std::thread copies([&] {
    OnDevice on(1);
    communicator->EnqueueStart(second.CallOf(), second.on.stream);
  });
  CHECK_TRUE(Comes([&] { return communicator->stats().in_flight > 0; }));
  communicator->Abort(FailedPrecondition("closed by the test"));
  copies.join();
  queue_is_full = false;
  for (Part* part : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueDone(part->CallOf(), part->on.stream).failure());
    part->on.Synchronize();
  }
}

TEST(closing_lets_a_rank_come_that_another_waits_for) {
  auto communicator = Make(2);
  const auto site = Site("permute", {1, 0});
  std::thread closes;
  TheFake().clear_trace();
  ForAll(2, site.get(), [&](Part& part) {
    if (part.device == 1) {
      CHECK_TRUE(Comes([&] { return communicator->stats().in_flight == 1; }));
      closes = std::thread(
          [&] { communicator->Abort(FailedPrecondition("closed by the test")); });
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    CHECK_TRUE(communicator->Enqueue(part.CallOf(), part.on.stream).success());
  });
  closes.join();
  // It counted while it waited on the host, not in NCCL later on.
  CHECK_EQ(Count("ncclSend"), 0);
  Part part(0, site.get());
  CHECK_CONTAINS(
      std::string(communicator->Enqueue(part.CallOf(), part.on.stream).message()),
      "closed by the test");
}

TEST(a_copy_that_fails_ends_the_communicator) {
  auto communicator = Make(2);
  const auto site = Site("permute", {1, 0});
  Part first(0, site.get()), second(1, site.get());
  CHECK_TRUE(communicator->EnqueueStart(first.CallOf(), first.on.stream).success());
  // The second's own goes; that of the first, which the second enqueues, does not.
  TheFake().fail("cuMemcpyDtoDAsync_v2", 1, cuda::kInvalidValue);
  const Status status = communicator->EnqueueStart(second.CallOf(), second.on.stream);
  CHECK_CONTAINS(std::string(status.message()), "cuMemcpyDtoDAsync");
  CHECK_CONTAINS(std::string(status.message()), "jaxcomm.init()");
  CHECK_CONTAINS(
      std::string(communicator->EnqueueDone(first.CallOf(), first.on.stream).message()),
      "cuMemcpyDtoDAsync");
  for (const auto& entry : communicator->recorder().Snapshot()) {
    CHECK_TRUE(entry.state != FlightRecorder::State::kStarted);
    if (entry.rank == 0) CHECK_TRUE(entry.state == FlightRecorder::State::kFailed);
  }
  for (Part* part : {&first, &second}) part->on.Synchronize();
}

TEST(nobody_takes_what_could_not_be_sent_for_sent) {
  FlightRecorder recorder({{100, 101}});
  std::vector<RankFacts> members;
  for (int rank = 0; rank < 2; ++rank) {
    cuda::Context context = nullptr;
    TheFake().cuda.DevicePrimaryCtxRetain(&context, rank);
    members.push_back({0, rank, 2, rank, context});
  }
  const auto copies = Must(PeerCopies::Create(Library(), recorder, members));
  const auto site = Site("permute", {1, 0});
  const auto plan = std::make_shared<const PeerPlan>(
      MakePeerPlan(*site, Must(site->MakePlan(2, /*operands_of=*/nullptr))));
  Part first(0, site.get()), second(1, site.get());
  const auto start = [&](Part& part) {
    CurrentContext current(Library().cuda, members[part.device].context);
    return copies->Start(part.CallOf(), plan, part.device, part.on.stream, nullptr, {});
  };
  CHECK_TRUE(start(first).success());
  TheFake().fail("cuMemcpyDtoDAsync_v2", 1, cuda::kInvalidValue);
  CHECK_TRUE(start(second).failure());
  // Before the communicator learns of it.
  bool is_begun = false;
  PeerCopies::LeftToNccl left;
  const Status status =
      copies->Done(second.results[0], 1, second.on.stream, 30, &is_begun, &left);
  CHECK_TRUE(is_begun);
  CHECK_CONTAINS(std::string(status.message()), "cuMemcpyDtoDAsync");
  copies->Done(first.results[0], 0, first.on.stream, 30, &is_begun, &left);
  for (Part* part : {&first, &second}) part->on.Synchronize();
  for (size_t member : {0, 1}) {
    CHECK_TRUE(Comes([&] {
      copies->in_flight(member).Refresh();
      return copies->in_flight(member).size() == 0;
    }));
  }
}

}  // namespace
}  // namespace jaxcomm::testing
