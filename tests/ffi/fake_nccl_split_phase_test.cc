// Split-phase collectives on devices with streams, as XLA:GPU asks for them, and what
// closing waits for.

#include "ffi/backends/nccl/failure/process_failure.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

const Status kClosed = FailedPrecondition("closed");

// Two ranks of a swap of two numbers.
struct Swap : Two {
  Swap() : Two(Site()) {
    first.operand[0] = 1;
    second.operand[0] = 2;
  }
  static CallSite* Site() {
    static CallSite* const site = FloatSite("permute", {1, 0}, 1).release();
    return site;
  }
};

TEST(a_start_that_fails_is_waited_for_as_far_as_it_came) {
  Part part(0, Swap::Site());
  SplitPhase split(Library());
  CHECK_OK(split.Prepare());
  Gate gate;
  const Status status = split.Start(part.CallOf(), part.on.stream, [&] {
    gate.Hold(split.stream());
    return FailedPrecondition("half of it");
  });
  CHECK_FAILS(status, "half of it");
  CHECK_EQ(Cuda().StreamQuery(part.on.stream), cuda::kNotReady);
  gate.Open();
  part.on.Synchronize();
  split.Release();
}

TEST(a_start_waits_for_its_operands_and_a_done_for_the_results) {
  auto communicator = Make();
  Swap swap;
  Gate operand;  // of the first, which the stream has yet to compute
  operand.Hold(swap.first.on.stream);
  Cuda().LaunchHostFunc(
      swap.first.on.stream, [](void* to) { *static_cast<float*>(to) = 5; },
      swap.first.operand.data());
  TheFake().clear_trace();
  swap.Start(*communicator);
  swap.Done(*communicator);
  const Milestone over(swap.second.on.stream);
  // No thread waited here. The second's stream waits for the bytes of the first.
  CHECK_EQ(Count("cuStreamSynchronize"), 0);
  LetOthersRun();
  CHECK_TRUE(!over.passed());
  operand.Open();
  swap.Synchronize();
  CHECK_EQ(swap.first.result[0], 2.0f);
  CHECK_EQ(swap.second.result[0], 5.0f);
}

TEST(split_phase_calls_make_no_event_once_warm) {
  auto communicator = Make();
  Swap swap;
  for (int round = 0; round < 20; ++round) {
    if (round == 2) TheFake().clear_trace();
    // Now and then a program fails in between, and its results come to lie where they
    // lay before.
    const int times = round % 4 == 1 ? 2 : 1;
    for (int i = 0; i < times; ++i) {
      swap.first.operand[0] = static_cast<float>(round + i);
      swap.Start(*communicator);
      // The operands are as they are until it is over.
      if (i + 1 < times) CHECK_TRUE(Until([&] { return IsIdle(*communicator); }));
    }
    swap.Done(*communicator);
    swap.Synchronize();
    CHECK_EQ(swap.second.result[0], static_cast<float>(round + times - 1));
    // A done is of one start.
    CHECK_FAILS(swap.first.Done(*communicator), "no collective was begun");
  }
  CHECK_EQ(Count("cuEventCreate"), 0);
  TheFake().clear_trace();
  communicator->Abort(kClosed);
  communicator.reset();
  // Operations in flight, of two events each, and the one of the split-phase call. If
  // the watch is polling it, the watch is the last that holds it.
  const int entries = InFlight::capacity() + InFlight::most_streams() - 1;
  const int events = 2 * (2 * entries + 1);
  CHECK_TRUE(Until([&] { return Count("cuEventDestroy_v2") >= events; }));
  CHECK_EQ(Count("cuEventDestroy_v2"), events);
}

// Its memory may be given to whatever runs next, on whichever communicator.
void LetALaterRunWait(Communicator& other, std::shared_ptr<Communicator> communicator) {
  Swap swap;
  // The second is late, and the program of the first fails before the done.
  CHECK_OK(swap.first.Start(*communicator));
  // No rank sends, so the call needs nothing of NCCL and would end at once.
  const auto zeros = FloatSite("permute", {-1, -1}, 1);
  float operand = 7, result = 7;
  const void* operands[] = {&operand};
  void* results[] = {&result};
  const auto run = [&](int number) {
    const Call call{zeros.get(), number, 1, 1, 0, operands, results, nullptr};
    CHECK_OK(other.Enqueue(call, swap.first.on.stream));
  };
  run(1);
  swap.first.on.Synchronize();
  CHECK_EQ(result, 0.0f);
  result = 7;
  TheFake().clear_trace();
  run(2);
  run(2);
  CHECK_EQ(Count("cuStreamWaitEvent"), 1);
  LetOthersRun();
  CHECK_EQ(swap.first.result[0], -1.0f);
  CHECK_EQ(result, 7.0f);
  CHECK_OK(swap.second.Start(*communicator));
  swap.first.on.Synchronize();
  CHECK_EQ(swap.first.result[0], 2.0f);
  CHECK_EQ(result, 0.0f);
}

TEST(a_later_run_waits_for_what_a_failed_one_started) {
  for (const bool is_another : {false, true}) {
    const auto communicator = Make(), another = Make();
    LetALaterRunWait(is_another ? *another : *communicator, communicator);
  }
}

// Enqueues a call that a graph records.
void Record(Communicator& communicator, Swap& swap) {
  for (Part* part : {&swap.first, &swap.second}) {
    TheFake().set_capturing(part->on.stream, true);
    Call call = part->CallOf();
    call.may_be_captured = true;
    CHECK_OK(communicator.Enqueue(call, part->on.stream));
    TheFake().set_capturing(part->on.stream, false);
  }
}

TEST(what_a_graph_records_is_not_followed_and_outlives_the_communicator) {
  auto communicator = Make();
  Swap swap;
  Record(*communicator, swap);
  CHECK_EQ(communicator->stats().in_flight, 0);
  TheFake().clear_trace();
  communicator->Abort(kClosed);
  communicator.reset();
  for (const char* name : {"ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"}) {
    CHECK_EQ(Count(name), 0);
  }
}

TEST_ALONE(the_end_of_what_a_graph_recorded_waits_for_no_graph, EXIT_SUCCESS) {
  Options options;
  options.timeout = kExpires;
  auto communicator = Make(options);
  Swap swap;
  Record(*communicator, swap);
  swap.Synchronize();
  // The first hangs, in want of the second.
  TheFake().clear_trace();
  CHECK_OK(swap.first.Enqueue(*communicator));
  CHECK_TRUE(Until([] { return Count("ncclCommAbort") == 2; }));
  swap.first.on.Synchronize();
  CHECK_FAILS(swap.second.Enqueue(*communicator), "not done after 1 s");
  communicator->Abort(kClosed);
  communicator.reset();
  CHECK_EQ(Count("cuMemFree_v2"), 0);
  TheFake().end_graphs();
}

// What a rank's thread does while it gives its stream a send: none while it is made.
std::atomic<bool> is_launching{false}, holds{false};
std::function<bool()> may_launch;

std::shared_ptr<Communicator> MakeSlowToLaunch(NcclLibrary library = Library()) {
  library.nccl.Send = [](const void* data, size_t count, nccl::Type type, int peer,
                         nccl::Comm comm, nccl::Stream stream) {
    if (holds) {
      is_launching = true;
      CHECK_TRUE(Until(may_launch));
    }
    return Nccl().Send(data, count, type, peer, comm, stream);
  };
  Options options;
  options.library = library;
  holds = is_launching = false;
  auto communicator = Make(options);
  holds = true;
  return communicator;
}

TEST(closing_ends_what_a_rank_is_given_meanwhile_and_another_is_not) {
  static std::atomic<bool> launched{false};
  may_launch = [] { return launched.load(); };
  auto communicator = MakeSlowToLaunch();
  Swap swap;
  std::thread launches([&] {
    OnDevice on(0);
    (void)swap.first.Enqueue(*communicator);
  });
  CHECK_TRUE(Until([] { return is_launching.load(); }));
  std::thread closes([&] { communicator->Abort(kClosed); });
  launched = true;
  launches.join();
  closes.join();
  CHECK_FAILS(swap.second.Enqueue(*communicator), "closed");
  // No rank sends the bytes that the first waits for.
  swap.first.on.Synchronize();
}

thread_local bool closes_here = false;
std::atomic<int> looks{0};

// A thread that is slow to launch is no reason to stop the devices.
TEST(closing_waits_for_a_rank_that_is_about_to_launch) {
  NcclLibrary library = Library();
  // Called by whoever closes, in each of its looks at a rank.
  library.cuda.CtxPushCurrent = [](cuda::Context context) {
    looks += closes_here;
    return Cuda().CtxPushCurrent(context);
  };
  may_launch = [] { return looks >= 8; };  // two each time, one at each rank
  auto communicator = MakeSlowToLaunch(library);
  ProcessFailure::Get().Forget();
  Swap swap;
  std::thread launches([&] {
    OnDevice on(0);
    CHECK_OK(swap.first.Enqueue(*communicator));
  });
  CHECK_TRUE(Until([] { return is_launching.load(); }));
  std::thread closes([&] {
    closes_here = true;
    communicator->Abort(kClosed);
  });
  {
    OnDevice on(1);
    CHECK_OK(swap.second.Enqueue(*communicator));
  }
  launches.join();
  closes.join();
  swap.Synchronize();
  CHECK_EQ(swap.first.result[0], 2.0f);
  CHECK_EQ(swap.second.result[0], 1.0f);
  CHECK_EQ(ProcessFailure::Get().first(), "");
}

TEST(closing_ends_a_rank_that_waits_in_nccl_for_another) {
  auto communicator = Make();
  Swap swap;
  TheFake().connect("ncclSend", 0);
  TheFake().clear_trace();
  std::thread waits([&] {
    OnDevice on(0);
    CHECK_TRUE(swap.first.Enqueue(*communicator).failure());
  });
  CHECK_TRUE(Until([] { return Count("ncclGroupEnd") > 0; }));
  communicator->Abort(kClosed);
  waits.join();
}

}  // namespace
}  // namespace jaxcomm::testing
