// The stand-in for libnccl: how communicators come, go and fail, with ranks as threads.
#include <array>
#include <filesystem>
#include <iterator>

#include "tests/ffi/check.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {
namespace {

using nccl::kSuccess;
using nccl::RedOp;
using nccl::Type;

nccl::Comm Split(nccl::Comm comm, int color, int key = 0,
                 nccl::Config* config = nullptr) {
  nccl::Comm child = nullptr;
  CHECK_EQ(Nccl().CommSplit(comm, color, key, &child, config), kSuccess);
  return child;
}

int32_t SumOf(Rank r, nccl::Comm comm, int32_t value) {
  CHECK_EQ(Sum(comm, r.stream(), &value), kSuccess);
  r.on->Synchronize();
  return value;
}

TEST(splits_by_color_and_orders_by_key) {
  const auto open_files = [] {
    const std::filesystem::directory_iterator files("/proc/self/fd"), end;
    return std::distance(files, end);
  };
  const auto before = open_files();
  RunRanks(4, [](Rank r) {
    // Colors 0 and 1, in reverse order; rank 3 takes part and gets none.
    const nccl::Comm child =
        Split(r.comm, r.rank == 3 ? nccl::kNoColor : r.rank % 2, -r.rank);
    CHECK_EQ(child == nullptr, r.rank == 3);
    if (child == nullptr) return;
    std::vector<int32_t> ranks(r.rank == 1 ? 1 : 2, -1);
    const int32_t mine = r.rank;
    Nccl().AllGather(&mine, ranks.data(), 1, Type::kInt32, child, r.stream());
    r.on->Synchronize();
    CHECK_EQ(ranks[0], r.rank == 1 ? 1 : 2);
    if (r.rank != 1) CHECK_EQ(ranks[1], 0);
    CHECK_EQ(Nccl().CommDestroy(child), kSuccess);
    CHECK_EQ(Nccl().CommDestroy(child), nccl::kInvalidArgument);
    CHECK_EQ(Sum(child, r.stream(), &ranks[0]), nccl::kInvalidArgument);
  });
  CHECK_EQ(open_files(), before);
}

TEST(a_failed_call_spoils_its_group) {
  RunRanks(1, [](Rank r) {
    int32_t value = 1;
    Nccl().GroupStart();
    CHECK_EQ(Sum(r.comm, r.stream(), &value), kSuccess);
    CHECK_EQ(Nccl().Send(&value, 1, Type::kInt32, 5, r.comm, r.stream()),
             nccl::kInvalidArgument);
    CHECK_EQ(Nccl().GroupEnd(), nccl::kInvalidArgument);
    CHECK_CONTAINS(Nccl().GetLastError(nullptr), "rank 5 is not one of the 1");
  });
}

// Two ranks on devices 0 and `device`, which disagree by so much about their number.
void TryTwo(int device, int more, nccl::Result expected, const std::string& text) {
  const nccl::UniqueId id = NewId();
  ForRanks(2, [&](int rank) {
    OnDevice on(rank * device);
    nccl::Comm comm = nullptr;
    nccl::Config config = NewConfig();
    CHECK_EQ(Nccl().CommInitRankConfig(&comm, 2 + rank * more, id, rank, &config),
             expected);
    CHECK_EQ(comm == nullptr, expected != kSuccess);
    if (comm == nullptr) CHECK_CONTAINS(Nccl().GetLastError(nullptr), text);
    if (comm != nullptr) Nccl().CommDestroy(comm);
  });
}

TEST(two_ranks_on_one_gpu_and_other_numbers_of_ranks_are_refused) {
  TryTwo(0, 0, nccl::kInvalidUsage,
         "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 0");
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  TryTwo(0, 0, kSuccess, "");
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  TryTwo(1, 1, nccl::kInvalidArgument, "Ranks disagree about their number");
}

TEST(windows_are_registered_by_all_or_none) {
  RunRanks(2, [](Rank r) {
    void* data = nullptr;
    CHECK_EQ(Nccl().MemAlloc(&data, 8192), kSuccess);
    nccl::Window window = nullptr;
    const auto try_it = [&](void* from, size_t bytes) {
      return Nccl().CommWindowRegister(r.comm, from, bytes, &window, 1);
    };
    CHECK_EQ(try_it(data, r.rank == 0 ? 4096 : 8192), nccl::kInvalidArgument);
    CHECK_CONTAINS(Nccl().GetLastError(nullptr), "4096 and 8192 bytes");
    int32_t elsewhere = 0;
    CHECK_EQ(try_it(r.rank == 0 ? data : &elsewhere, 4), nccl::kInvalidArgument);
    CHECK_CONTAINS(Nccl().GetLastError(nullptr), "Window of rank 1 is not aligned");
    CHECK_TRUE(window == nullptr);
    CHECK_EQ(try_it(data, 8192), kSuccess);
    CHECK_EQ(Nccl().CommWindowDeregister(r.comm, window), kSuccess);
    CHECK_EQ(Nccl().CommWindowDeregister(r.comm, window), nccl::kInvalidArgument);
    CHECK_EQ(Nccl().MemFree(data), kSuccess);
  });
}

// Checks what every rank sees after `call` did not fit, and that only an abort helps.
void CheckDisagreement(const std::function<nccl::Result(Rank, int32_t*)>& call,
                       const std::string& text) {
  RunRanks(3, [&](Rank r) {
    int32_t values[16] = {};
    call(r, values);
    CHECK_TRUE(Until([&] { return AsyncErrorOf(r.comm) != kSuccess; }));
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
        return Nccl().AllReduce(values, values, r.rank == 2 ? 2 : 1, Type::kInt32,
                                r.rank == 2 ? RedOp::kMax : RedOp::kSum, r.comm,
                                r.stream());
      },
      "Rank 0 and rank 2 disagree about ncclAllReduce: count 1 against 2, op 0 against "
      "2");
  CheckDisagreement(
      [](Rank r, int32_t* values) {
        return r.rank == 1 ? Nccl().AllGather(values, values, 1, Type::kInt32, r.comm,
                                              r.stream())
                           : Nccl().Broadcast(values, values, 1, Type::kInt32, 0,
                                              r.comm, r.stream());
      },
      "Rank 0 and rank 1 disagree about ncclBroadcast against ncclAllGather");
  CheckDisagreement(
      [](Rank r, int32_t* values) {
        return r.rank == 0
                   ? Nccl().Send(values, 2, Type::kInt32, 1, r.comm, r.stream())
                   : Nccl().Recv(values, 1, Type::kInt32, 0, r.comm, r.stream());
      },
      "Rank 0 sends count 2 type 2 and rank 1 receives count 1 type 2");
}

// Until both ranks have looked: the abort of one ends what the other is at.
void WaitForBoth(std::atomic<int>& looked) {
  ++looked;
  CHECK_TRUE(Until([&] { return looked >= 2; }));
}

TEST(sends_outside_a_group_wait_and_an_abort_ends_them) {
  std::atomic<int> looked{0};
  RunRanks(2, [&](Rank r) {
    int32_t sent = 7, received = 0;
    Nccl().Send(&sent, 1, Type::kInt32, 1 - r.rank, r.comm, r.stream());
    Nccl().Recv(&received, 1, Type::kInt32, 1 - r.rank, r.comm, r.stream());
    CHECK_EQ(Cuda().StreamQuery(r.stream()), cuda::kNotReady);
    WaitForBoth(looked);
    CHECK_EQ(Nccl().CommAbort(r.comm), kSuccess);
    // The stream goes on.
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);
    CHECK_EQ(received, 0);
  });
}

TEST(those_that_share_resources_take_turns_and_go_together) {
  std::atomic<int> looked{0};
  RunRanks(2, [&](Rank r) {
    nccl::Config config = NewConfig();
    config.split_share = 1;
    const nccl::Comm shared = Split(r.comm, 0, r.rank, &config);
    config.split_share = 0;
    const nccl::Comm own = Split(r.comm, 0, r.rank, &config);
    int32_t never = 0, behind = 1, beside = 1;
    OnDevice second(r.rank), third(r.rank);
    Nccl().Recv(&never, 1, Type::kInt32, 1 - r.rank, r.comm, r.stream());
    Sum(shared, second.stream, &behind);
    // What has its own need not wait.
    Sum(own, third.stream, &beside);
    third.Synchronize();
    CHECK_EQ(beside, 2);
    CHECK_EQ(Cuda().StreamQuery(second.stream), cuda::kNotReady);
    WaitForBoth(looked);

    CHECK_EQ(Nccl().CommAbort(shared), kSuccess);
    second.Synchronize();
    r.on->Synchronize();
    CHECK_EQ(behind, 1);
    // NCCL tells its siblings nothing: their operations end, and leave the results as
    // they were.
    CHECK_EQ(AsyncErrorOf(r.comm), kSuccess);
    CHECK_EQ(SumOf(r, r.comm, 1), 1);
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
    const nccl::Comm child = Split(r.comm, 0);
    CHECK_EQ(SumOf(r, child, 1), 2);
    CHECK_EQ(Nccl().CommDestroy(child), kSuccess);
  });
}

}  // namespace
}  // namespace jaxcomm::testing
