// Split-phase collectives on devices with streams, as XLA:GPU asks for them.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/backends/nccl/device_stop.h"
#include "ffi/backends/nccl/nccl_communicator.h"
#include "tests/ffi/check.h"
#include "tests/ffi/fake_library.h"
#include "tests/ffi/fake_nccl.h"
#include "tests/ffi/nccl_stats.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

std::shared_ptr<Communicator> Make(const NcclLibrary& library = Library(),
                                   double timeout_seconds = 30,
                                   OnFailure on_failure = OnFailure::kPoison) {
  const nccl::UniqueId id = NewId();
  auto world =
      Must(NcclWorld::Create(library, 2, {{100, 0, 0}, {101, 1, 1}},
                             {id.internal, sizeof(id.internal)}, {}, {30}, {}));
  return Must(MakeNcclCommunicator(Spec({{100, 101}}, timeout_seconds),
                                   {world, {}, {30}, {}, on_failure}));
}

// One rank of a swap of two numbers, and XLA's stream of it.
struct Swap {
  explicit Swap(int device)
      : on(device),
        device(device),
        site(MakeSite("permute", {1, 0}, {FloatLeaf(1)}, {FloatLeaf(1)})) {}
  // The stream may still be at the two numbers, also of a call that has failed.
  ~Swap() { on.Synchronize(); }

  Call CallOf() {
    return Call{site.get(), 1, 1, 1, device, operands, results, nullptr};
  }
  OnDevice on;
  int device;
  std::unique_ptr<CallSite> site;
  float operand = -1, result = -1;
  const void* operands[1] = {&operand};
  void* results[1] = {&result};
};

TEST(a_start_waits_for_its_operands_and_a_done_for_the_results) {
  auto communicator = Make();
  Swap first(0), second(1);
  second.operand = 2;
  Gate operand;  // of the first, which the stream has yet to compute
  TheFake().cuda.LaunchHostFunc(first.on.stream, &Gate::Wait, &operand);
  TheFake().cuda.LaunchHostFunc(
      first.on.stream, [](void* to) { *static_cast<float*>(to) = 1; }, &first.operand);
  TheFake().clear_trace();
  for (Swap* swap : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueStart(swap->CallOf(), swap->on.stream).success());
  }
  for (Swap* swap : {&first, &second}) {
    CHECK_TRUE(communicator->EnqueueDone(swap->CallOf(), swap->on.stream).success());
  }
  std::atomic<bool> is_over{false};
  TheFake().cuda.LaunchHostFunc(
      second.on.stream,
      [](void* over) { *static_cast<std::atomic<bool>*>(over) = true; }, &is_over);
  // No thread waited here. The second's stream waits for the bytes of the first.
  CHECK_EQ(Count("cuStreamSynchronize"), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_TRUE(!is_over);
  operand.open = true;
  first.on.Synchronize();
  second.on.Synchronize();
  CHECK_EQ(first.result, 2.0f);
  CHECK_EQ(second.result, 1.0f);
}

TEST(split_phase_calls_make_no_event_once_warm) {
  auto communicator = Make();
  Swap first(0), second(1);
  for (int round = 0; round < 20; ++round) {
    if (round == 2) TheFake().clear_trace();
    // Now and then a program fails in between, and its results come to lie where they
    // lay before.
    const int times = round % 4 == 1 ? 2 : 1;
    for (int i = 0; i < times; ++i) {
      first.operand = static_cast<float>(round + i);
      for (Swap* swap : {&first, &second}) {
        CHECK_TRUE(
            communicator->EnqueueStart(swap->CallOf(), swap->on.stream).success());
      }
      if (i + 1 < times) {
        // The operands are as they are until it is over.
        while (communicator->stats().in_flight > 0) std::this_thread::yield();
      }
    }
    for (Swap* swap : {&first, &second}) {
      CHECK_TRUE(communicator->EnqueueDone(swap->CallOf(), swap->on.stream).success());
      swap->on.Synchronize();
    }
    CHECK_EQ(second.result, static_cast<float>(round + times - 1));
    // A done is of one start.
    CHECK_CONTAINS(
        std::string(
            communicator->EnqueueDone(first.CallOf(), first.on.stream).message()),
        "no collective was begun");
  }
  CHECK_EQ(Count("cuEventCreate"), 0);
  TheFake().clear_trace();
  communicator->Abort(FailedPrecondition("closed"));
  communicator.reset();
  // 64 operations in flight, of two events each, and the one of the split-phase call.
  // If the watch is polling it, the watch is the last that holds it.
  CHECK_TRUE(Comes([] { return Count("cuEventDestroy_v2") >= 2 * (2 * 64 + 1); }));
  CHECK_EQ(Count("cuEventDestroy_v2"), 2 * (2 * 64 + 1));
}

TEST(a_later_run_waits_for_what_a_failed_one_started) {
  auto communicator = Make();
  Swap first(0), second(1);
  first.operand = 1;
  second.operand = 2;
  // The second is late, and the program of the first fails before the done.
  CHECK_TRUE(communicator->EnqueueStart(first.CallOf(), first.on.stream).success());
  // No rank sends, so the call needs nothing of NCCL and would end at once.
  const auto zeros = MakeSite("permute", {-1, -1}, {FloatLeaf(1)}, {FloatLeaf(1)});
  float operand = 7, result = 7;
  const void* operands[] = {&operand};
  void* results[] = {&result};
  const auto run = [&](int number) {
    const Call call{zeros.get(), number, 1, 1, 0, operands, results, nullptr};
    CHECK_TRUE(communicator->Enqueue(call, first.on.stream).success());
  };
  run(1);
  first.on.Synchronize();
  CHECK_EQ(result, 0.0f);
  result = 7;
  TheFake().clear_trace();
  run(2);
  run(2);
  CHECK_EQ(Count("cuStreamWaitEvent"), 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_EQ(first.result, -1.0f);
  CHECK_EQ(result, 7.0f);
  CHECK_TRUE(communicator->EnqueueStart(second.CallOf(), second.on.stream).success());
  first.on.Synchronize();
  CHECK_EQ(first.result, 2.0f);
  CHECK_EQ(result, 0.0f);
}

TEST(what_a_graph_records_is_not_followed_and_outlives_the_communicator) {
  auto communicator = Make();
  Swap first(0), second(1);
  for (Swap* swap : {&first, &second}) TheFake().set_capturing(swap->on.stream, 1);
  for (Swap* swap : {&first, &second}) {
    Call call = swap->CallOf();
    call.may_be_captured = true;
    CHECK_TRUE(communicator->Enqueue(call, swap->on.stream).success());
  }
  CHECK_EQ(communicator->stats().in_flight, 0);
  for (Swap* swap : {&first, &second}) TheFake().set_capturing(swap->on.stream, 0);
  TheFake().clear_trace();
  communicator->Abort(FailedPrecondition("closed"));
  communicator.reset();
  for (const char* name : {"ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"}) {
    CHECK_EQ(Count(name), 0);
  }
  // The stand-in runs what it captures, and writes to these.
  for (Swap* swap : {&first, &second}) swap->on.Synchronize();
}

TEST(the_end_of_what_a_graph_recorded_waits_for_no_graph) {
  auto communicator = Make(Library(), /*timeout_seconds=*/0.2);
  Swap first(0), second(1);
  for (Swap* swap : {&first, &second}) {
    TheFake().set_capturing(swap->on.stream, 1);
    Call call = swap->CallOf();
    call.may_be_captured = true;
    CHECK_TRUE(communicator->Enqueue(call, swap->on.stream).success());
    TheFake().set_capturing(swap->on.stream, 0);
  }
  for (Swap* swap : {&first, &second}) swap->on.Synchronize();
  // The first hangs, in want of the second.
  TheFake().clear_trace();
  CHECK_TRUE(communicator->Enqueue(first.CallOf(), first.on.stream).success());
  CHECK_TRUE(Comes([] { return Count("ncclCommAbort") == 2; }));
  first.on.Synchronize();
  CHECK_CONTAINS(
      std::string(communicator->Enqueue(second.CallOf(), second.on.stream).message()),
      "not done after 0.2 s");
  communicator->Abort(FailedPrecondition("closed"));
  communicator.reset();
  CHECK_EQ(Count("cuMemFree_v2"), 0);
  TheFake().end_graphs();
}

std::atomic<bool> is_launching{false};
Gate launched;

TEST(closing_ends_what_a_rank_is_given_meanwhile_and_another_is_not) {
  static NcclLibrary library = Library();
  library.nccl.Send = [](const void* data, size_t count, nccl::Type type, int peer,
                         nccl::Comm comm, nccl::Stream stream) {
    is_launching = true;
    Gate::Wait(&launched);
    return TheFake().nccl.Send(data, count, type, peer, comm, stream);
  };
  launched.open = true;  // while it is made
  auto communicator = Make(library);
  launched.open = is_launching = false;
  Swap first(0), second(1);
  std::thread launches([&] {
    OnDevice on(0);
    communicator->Enqueue(first.CallOf(), first.on.stream);
  });
  while (!is_launching) std::this_thread::yield();
  std::thread closes([&] { communicator->Abort(FailedPrecondition("closed")); });
  // This waits for the thread that launches as well, until closing has given it up.
  auto& nccl = dynamic_cast<NcclCommunicator&>(*communicator);
  CHECK_CONTAINS(std::string(nccl.SetSuspended(true).message()), "closed");
  launched.open = true;
  launches.join();
  closes.join();
  CHECK_CONTAINS(
      std::string(communicator->Enqueue(second.CallOf(), second.on.stream).message()),
      "closed");
  // No rank sends the bytes that the first waits for.
  first.on.Synchronize();
}

thread_local bool closes_here = false;
std::atomic<int> looks{0};
constexpr int kFewLooks = 8;  // two each time, one at each rank

// A thread that is slow to launch is no reason to stop the devices.
TEST(closing_waits_for_a_rank_that_is_about_to_launch) {
  static NcclLibrary library = Library();
  library.nccl.Send = [](const void* data, size_t count, nccl::Type type, int peer,
                         nccl::Comm comm, nccl::Stream stream) {
    is_launching = true;
    CHECK_TRUE(Comes([] { return looks >= kFewLooks; }));
    return TheFake().nccl.Send(data, count, type, peer, comm, stream);
  };
  // Called by whoever closes, in each of its looks at a rank.
  library.cuda.CtxPushCurrent = [](cuda::Context context) {
    looks += closes_here;
    return TheFake().cuda.CtxPushCurrent(context);
  };
  looks = kFewLooks;  // while it is made
  auto communicator = Make(library);
  looks = 0;
  is_launching = false;
  ForgetFailures();
  Swap first(0), second(1);
  first.operand = 1, second.operand = 2;
  std::thread launches([&] {
    OnDevice on(0);
    CHECK_TRUE(communicator->Enqueue(first.CallOf(), first.on.stream).success());
  });
  while (!is_launching) std::this_thread::yield();
  std::thread closes([&] {
    closes_here = true;
    communicator->Abort(FailedPrecondition("closed"));
  });
  {
    OnDevice on(1);
    CHECK_TRUE(communicator->Enqueue(second.CallOf(), second.on.stream).success());
  }
  launches.join();
  closes.join();
  first.on.Synchronize();
  second.on.Synchronize();
  CHECK_EQ(first.result, second.operand);
  CHECK_EQ(second.result, first.operand);
  CHECK_EQ(FirstFailure(), "");
}

TEST(closing_ends_a_rank_that_waits_in_nccl_for_another) {
  auto communicator = Make();
  Swap first(0);
  TheFake().hang("ncclGroupEnd", 0);
  TheFake().clear_trace();
  std::thread waits([&] {
    OnDevice on(0);
    CHECK_TRUE(communicator->Enqueue(first.CallOf(), first.on.stream).failure());
  });
  CHECK_TRUE(Comes([] { return Count("ncclGroupEnd") > 0; }));
  communicator->Abort(FailedPrecondition("closed"));
  waits.join();
}

TEST(bytes_are_what_the_local_ranks_hand_in) {
  auto communicator = Make();
  Swap first(0), second(1);
  first.operand = second.operand = 1;
  for (Swap* swap : {&first, &second}) {
    CHECK_TRUE(communicator->Enqueue(swap->CallOf(), swap->on.stream).success());
  }
  CHECK_EQ(communicator->stats().bytes, 8);
}

TEST(a_call_is_symmetric_if_operands_and_results_are) {
  auto communicator = Make();
  auto& nccl = dynamic_cast<NcclCommunicator&>(*communicator);
  const auto memory = Must(SymmetricMemory::Create(Library(), {0, 1}, 1 << 16));
  CHECK_EQ(Must(nccl.Register(memory)), std::string("window"));
  Swap first(0), second(1);
  int expected = 0;
  for (const bool in : {false, true}) {
    for (const bool out : {false, true}) {
      for (Swap* swap : {&first, &second}) {
        auto* const block = static_cast<float*>(memory->data(swap->device));
        swap->operands[0] = in ? block : &swap->operand;
        swap->results[0] = out ? block + 128 : &swap->result;
        CHECK_TRUE(communicator->Enqueue(swap->CallOf(), swap->on.stream).success());
      }
      for (Swap* swap : {&first, &second}) swap->on.Synchronize();
      expected += in && out;
      CHECK_EQ(NcclStatsOf(*communicator).symmetric_calls, expected);
    }
  }
}

TEST(suspending_waits_for_what_is_on_its_way) {
  auto communicator = Make();
  auto& nccl = dynamic_cast<NcclCommunicator&>(*communicator);
  Swap first(0), second(1);
  Gate gate;
  TheFake().cuda.LaunchHostFunc(first.on.stream, &Gate::Wait, &gate);
  for (Swap* swap : {&first, &second}) {
    CHECK_TRUE(communicator->Enqueue(swap->CallOf(), swap->on.stream).success());
  }
  TheFake().clear_trace();
  Status status = OkStatus();
  std::thread suspends([&] { status = nccl.SetSuspended(true); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_EQ(Count("ncclCommSuspend"), 0);
  gate.open = true;
  suspends.join();
  CHECK_TRUE(status.success());
  CHECK_EQ(Count("ncclCommSuspend"), 2);
}

}  // namespace
}  // namespace jaxcomm::testing
