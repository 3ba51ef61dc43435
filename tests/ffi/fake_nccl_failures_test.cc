// The stand-in for libnccl: how communicators fail, stop and are given up, with ranks
// as threads.
#include <atomic>
#include <thread>

#include "tests/ffi/check.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {
namespace {

using nccl::kSuccess;
using nccl::RedOp;
using nccl::Type;

const nccl::Api& Nccl() { return TheFake().nccl; }

// Sums the ranks' `value`s in one element.
nccl::Result Sum(nccl::Comm comm, nccl::Stream stream, int32_t* value) {
  return Nccl().AllReduce(value, value, 1, Type::kInt32, RedOp::kSum, comm, stream);
}

// Checks what every rank sees after `call` did not fit, and that only an abort helps.
void CheckDisagreement(const std::function<nccl::Result(Rank, int32_t*)>& call,
                       const std::string& text) {
  RunRanks(3, [&](Rank r) {
    int32_t values[16] = {};
    call(r, values);
    CHECK_TRUE(Comes([&] { return AsyncErrorOf(r.comm) != kSuccess; }));
    CHECK_EQ(AsyncErrorOf(r.comm), nccl::kInvalidUsage);
    CHECK_EQ(std::string(Nccl().GetLastError(r.comm)), text);
    CHECK_EQ(Nccl().CommDestroy(r.comm), nccl::kInvalidUsage);
    CHECK_EQ(Nccl().CommAbort(r.comm), kSuccess);
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);
  });
}

TEST(ranks_that_disagree_have_an_asynchronous_error) {
  CheckDisagreement(
      [](Rank r, int32_t* values) {
        const size_t count = r.rank == 2 ? 2 : 1;
        return Nccl().AllReduce(values, values, count, Type::kInt32,
                                r.rank == 2 ? RedOp::kMax : RedOp::kSum, r.comm,
                                r.stream());
      },
      "Rank 0 and rank 2 disagree about ncclAllReduce: count 1 against 2, op 0 against "
      "2");
  CheckDisagreement(
      [](Rank r, int32_t* values) {
        if (r.rank == 1) {
          return Nccl().AllGather(values, values, 1, Type::kInt32, r.comm, r.stream());
        }
        return Nccl().Broadcast(values, values, 1, Type::kInt32, 0, r.comm, r.stream());
      },
      "Rank 0 and rank 1 disagree about ncclBroadcast against ncclAllGather");
  CheckDisagreement(
      [](Rank r, int32_t* values) {
        if (r.rank == 0) {
          return Nccl().Send(values, 2, Type::kInt32, 1, r.comm, r.stream());
        }
        return Nccl().Recv(values, 1, Type::kInt32, 0, r.comm, r.stream());
      },
      "Rank 0 sends count 2 type 2 and rank 1 receives count 1 type 2");
}

// Until both ranks have looked: the abort of one ends what the other is at.
void WaitForBoth(std::atomic<int>& looked) {
  ++looked;
  while (looked < 2) std::this_thread::yield();
}

TEST(sends_outside_a_group_wait_and_an_abort_ends_them) {
  std::atomic<int> looked{0};
  RunRanks(2, [&](Rank r) {
    int32_t sent = 7, received = 0;
    const int peer = 1 - r.rank;
    Nccl().Send(&sent, 1, Type::kInt32, peer, r.comm, r.stream());
    Nccl().Recv(&received, 1, Type::kInt32, peer, r.comm, r.stream());
    CHECK_EQ(TheFake().cuda.StreamQuery(r.stream()), cuda::kNotReady);
    WaitForBoth(looked);
    CHECK_EQ(Nccl().CommAbort(r.comm), kSuccess);
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);
    CHECK_EQ(received, 0);
    // The stream goes on.
    TheFake().cuda.MemsetD8Async(reinterpret_cast<uintptr_t>(&received), 1, 1,
                                 r.stream());
    r.on->Synchronize();
    CHECK_EQ(received, 1);
  });
}

TEST(those_that_share_resources_take_turns_and_go_together) {
  std::atomic<int> looked{0};
  RunRanks(2, [&](Rank r) {
    nccl::Config config = NewConfig();
    nccl::Comm shared = nullptr, own = nullptr;
    config.split_share = 1;
    CHECK_EQ(Nccl().CommSplit(r.comm, 0, r.rank, &shared, &config), kSuccess);
    config.split_share = 0;
    CHECK_EQ(Nccl().CommSplit(r.comm, 0, r.rank, &own, &config), kSuccess);
    int32_t never = 0, behind = 1, beside = 1;
    OnDevice second(r.rank), third(r.rank);
    Nccl().Recv(&never, 1, Type::kInt32, 1 - r.rank, r.comm, r.stream());
    Sum(shared, second.stream, &behind);
    // Time enough for what need not wait.
    for (int i = 0; i < 20; ++i) {
      beside = 1;
      Sum(own, third.stream, &beside);
      third.Synchronize();
      CHECK_EQ(beside, 2);
    }
    CHECK_EQ(TheFake().cuda.StreamQuery(second.stream), cuda::kNotReady);
    WaitForBoth(looked);

    CHECK_EQ(Nccl().CommAbort(shared), kSuccess);
    second.Synchronize();
    r.on->Synchronize();
    CHECK_EQ(behind, 1);
    // NCCL tells its siblings nothing: their operations end, and leave the results as
    // they were.
    CHECK_EQ(AsyncErrorOf(r.comm), kSuccess);
    CHECK_EQ(Sum(r.comm, r.stream(), &behind), kSuccess);
    r.on->Synchronize();
    CHECK_EQ(behind, 1);
    CHECK_EQ(AsyncErrorOf(own), kSuccess);
    CHECK_EQ(Nccl().CommDestroy(own), kSuccess);
  });
}

TEST(a_revoked_communicator_stops_and_can_still_be_split) {
  RunRanks(2, [](Rank r) {
    int32_t value = 1;
    Nccl().Recv(&value, 1, Type::kInt32, 1 - r.rank, r.comm, r.stream());
    CHECK_EQ(Nccl().CommRevoke(r.comm, 0), kSuccess);
    r.on->Synchronize();
    CHECK_EQ(Sum(r.comm, r.stream(), &value), nccl::kInvalidUsage);
    CHECK_EQ(Nccl().CommFinalize(r.comm), nccl::kInvalidUsage);
    nccl::Comm child = nullptr;
    CHECK_EQ(Nccl().CommSplit(r.comm, 0, 0, &child, nullptr), kSuccess);
    CHECK_EQ(Sum(child, r.stream(), &value), kSuccess);
    r.on->Synchronize();
    CHECK_EQ(value, 2);
    CHECK_EQ(Nccl().CommDestroy(child), kSuccess);
  });
}

}  // namespace
}  // namespace jaxcomm::testing
