// Copies that fail or end early: nothing is written to memory that was given away.
#include <atomic>
#include <thread>

#include "ffi/backends/nccl/plans/recipe.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

using State = FlightRecorder::State;

// Whether nothing is put into a rank's result that was told of a failure, once its own
// stream is done, which is when XLA gives the memory to somebody else.
void CheckNothingArrives(Part& sender, Part& told, Gate& gate) {
  std::thread opens([&] {
    LetOthersRun();
    gate.Open();
  });
  told.on.Synchronize();
  told.result[0] = 77;
  opens.join();
  sender.on.Synchronize();
  LetOthersRun();
  CHECK_EQ(told.result[0], 77.0f);
}

TEST_ALONE(who_is_told_of_a_failure_waits_for_what_is_on_its_way, EXIT_SUCCESS) {
  // What closing waits for is behind the gate.
  auto communicator = MakeCopying(kExpires);
  const auto site = Swap();
  Two two(site.get());
  Gate gate;  // the first's GPU is busy
  gate.Hold(two.first.on.stream);
  two.Start(*communicator);
  communicator->Abort(FailedPrecondition("closed"));
  CHECK_TRUE(two.second.Done(*communicator).failure());
  CheckNothingArrives(two.first, two.second, gate);
}

TEST(who_fails_to_begin_waits_for_what_is_on_its_way) {
  auto communicator = MakeCopying();
  const auto site = FloatSite("all_gather", {2}, kMany, 2 * kMany);
  Two two(site.get());
  Gate gate;
  gate.Hold(two.first.on.stream);
  CHECK_OK(two.first.Start(*communicator));
  // Rows of its own and for the first; then those of the first, the last of which are
  // refused.
  TheFake().fail("cuMemcpy2DAsync_v2", 3, cuda::kInvalidValue);
  CHECK_TRUE(two.second.Start(*communicator).failure());
  CheckNothingArrives(two.first, two.second, gate);
  CHECK_TRUE(two.first.Done(*communicator).failure());
}

// A call that fails ends its program, whichever call it is and whatever that has begun:
// copies, or what NCCL does on a stream of its own.
TEST(a_program_that_fails_waits_for_all_that_it_has_begun) {
  const auto large = Swap(), small = FloatSite("permute", {1, 0}, 1);
  for (CallSite* site : {large.get(), small.get()}) {
    for (const bool is_another : {false, true}) {
      const auto communicator = MakeCopying(), another = Make();
      Two two(site);
      const Part never(1, small.get());
      Gate gate;
      gate.Hold(two.first.on.stream);
      two.Start(*communicator);
      // It has begun nothing that gives these results.
      CHECK_FAILS((is_another ? another : communicator)
                      ->EnqueueDone(never.CallOf(), two.second.on.stream),
                  "no collective was begun");
      CheckNothingArrives(two.first, two.second, gate);
      (void)two.first.Done(*communicator);
    }
  }
}

TEST(nothing_is_sent_to_a_rank_that_went_on) {
  auto communicator = MakeCopying();
  const auto site = Swap();
  Two two(site.get());
  // The first's program failed after the start, and is run again.
  for (int64_t run : {1, 2}) CHECK_OK(two.first.Start(*communicator, run));
  TheFake().clear_trace();
  CHECK_FAILS(
      two.second.Enqueue(*communicator, 1),
      "rank 1 of 2 (device 101): rank 0, whose program failed, went on without it");
  CHECK_EQ(Count("cuMemcpyDtoDAsync_v2"), 0);
  // The run after it is not concerned.
  CHECK_OK(two.second.Enqueue(*communicator, 2));
  CHECK_OK(two.first.Done(*communicator, 2));
  CHECK_FAILS(two.first.Done(*communicator, 2), "no collective was begun");
  two.Synchronize();
  CHECK_TRUE(Holds(two.second, 0, two.first, 0, kMany));
}

TEST(nothing_is_copied_into_memory_that_a_failed_program_gave_away) {
  for (const bool is_another : {false, true}) {
    const auto communicator = MakeCopying(), another = Make();
    const auto site = Swap(), small = FloatSite("permute", {1, 0}, 1);
    Two two(site.get()), later(small.get());
    // The first's program failed after the start, and another program has run since.
    CHECK_OK(two.first.Start(*communicator));
    later.Enqueue(is_another ? *another : *communicator, 2);
    two.first.result[0] = 77;
    CHECK_FAILS(two.second.Start(*communicator), "rank 0, whose program failed");
    two.Synchronize();
    CHECK_EQ(two.first.result[0], 77.0f);
  }
}

TEST_ALONE(closing_ends_what_one_rank_alone_came_to, EXIT_SUCCESS) {
  auto communicator = MakeCopying(kExpires);  // so long does closing wait
  const auto site = Swap();
  Part first(0, site.get());
  CHECK_OK(first.Start(*communicator));
  communicator->Abort(FailedPrecondition("closed by the test"));
  CHECK_FAILS(first.Done(*communicator), "closed by the test");
  CHECK_EQ(CountOf(*communicator, State::kFailed), 1);
}

std::atomic<bool> queue_is_full{false};

TEST_ALONE(closing_ends_what_the_driver_makes_wait, EXIT_SUCCESS) {
  NcclLibrary library = MakeLibrary();
  library.cuda.MemcpyDtoDAsync = [](cuda::Pointer to, cuda::Pointer from, size_t bytes,
                                    cuda::Stream stream) {
    // A stream whose launch queue is full, behind an operation that hangs, blocks so.
    if (queue_is_full) CHECK_TRUE(Until([] { return Count("ncclCommAbort") > 0; }));
    return Cuda().MemcpyDtoDAsync(to, from, bytes, stream);
  };
  // So long does closing wait, once the driver keeps the second.
  auto communicator = MakeCopying(kExpires, 2, library);
  const auto site = Swap();
  Two two(site.get());
  CHECK_OK(two.first.Start(*communicator));
  TheFake().clear_trace();
  queue_is_full = true;
  std::thread copies([&] {
    OnDevice on(1);
    (void)two.second.Start(*communicator);
  });
  CHECK_TRUE(Until([&] { return !IsIdle(*communicator); }));
  communicator->Abort(FailedPrecondition("closed by the test"));
  copies.join();
  queue_is_full = false;
  for (Part* part : {&two.first, &two.second}) {
    CHECK_TRUE(part->Done(*communicator).failure());
  }
}

TEST(closing_lets_a_rank_come_that_another_waits_for) {
  auto communicator = MakeCopying();
  const auto site = Swap();
  std::thread closes;
  TheFake().clear_trace();
  ForParts(2, site.get(), [&](Part& part) {
    if (part.device == 1) {
      CHECK_TRUE(Until([&] { return communicator->stats().in_flight == 1; }));
      closes = std::thread(
          [&] { communicator->Abort(FailedPrecondition("closed by the test")); });
      LetOthersRun();
    }
    CHECK_OK(part.Enqueue(*communicator));
  });
  closes.join();
  // It counted while it waited on the host, not in NCCL later on.
  CHECK_EQ(Count("ncclSend"), 0);
  CHECK_FAILS(Part(0, site.get()).Enqueue(*communicator), "closed by the test");
}

TEST(a_copy_that_fails_ends_the_communicator) {
  auto communicator = MakeCopying();
  const auto site = Swap();
  Two two(site.get());
  CHECK_OK(two.first.Start(*communicator));
  // The second's own goes; that of the first, which the second enqueues, does not.
  TheFake().fail("cuMemcpyDtoDAsync_v2", 1, cuda::kInvalidValue);
  const Status status = two.second.Start(*communicator);
  CHECK_FAILS(status, "cuMemcpyDtoDAsync");
  CHECK_FAILS(status, "jaxcomm.init()");
  CHECK_FAILS(two.first.Done(*communicator), "cuMemcpyDtoDAsync");
  for (const auto& entry : communicator->recorder().Snapshot()) {
    CHECK_TRUE(entry.state != State::kStarted);
    if (entry.rank == 0) CHECK_TRUE(entry.state == State::kFailed);
  }
}

TEST(nobody_takes_what_could_not_be_sent_for_sent) {
  const auto site = Swap();
  Two two(site.get());
  FlightRecorder recorder({{100, 101}});
  const std::vector<RankFacts> members = {{0, 0, 2, 0, two.first.on.context},
                                          {0, 1, 2, 1, two.second.on.context}};
  const auto copies = Must(PeerCopies::Create(Library(), recorder, members));
  const auto plan = std::make_shared<const PeerPlan>(
      MakePeerPlan(*site, Must(site->MakePlan(2, /*operands_of=*/nullptr))));
  const auto start = [&](Part& part) {
    CurrentContext current(Library().cuda, members[part.device].context);
    return copies->Start(part.CallOf(), plan, part.device, part.on.stream, nullptr, {});
  };
  bool is_begun = false;
  PeerCopies::LeftToNccl left;
  const auto done = [&](Part& part) {
    return copies->Done(part.results[0], part.device, part.on.stream, kHangSeconds,
                        &is_begun, &left);
  };
  CHECK_OK(start(two.first));
  TheFake().fail("cuMemcpyDtoDAsync_v2", 1, cuda::kInvalidValue);
  CHECK_TRUE(start(two.second).failure());
  // Before the communicator learns of it.
  CHECK_FAILS(done(two.second), "cuMemcpyDtoDAsync");
  CHECK_TRUE(is_begun);
  (void)done(two.first);
  two.Synchronize();
  for (size_t member : {0, 1}) {
    CHECK_TRUE(Until([&] {
      copies->in_flight(member).Refresh();
      return copies->in_flight(member).size() == 0;
    }));
  }
}

}  // namespace
}  // namespace jaxcomm::testing
