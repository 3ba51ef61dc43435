// The stand-in for libnccl: how communicators come and go, with ranks as threads.
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

const nccl::Api& Nccl() { return TheFake().nccl; }

// Sums the ranks' `value`s in one element.
nccl::Result Sum(nccl::Comm comm, nccl::Stream stream, int32_t* value) {
  return Nccl().AllReduce(value, value, 1, Type::kInt32, RedOp::kSum, comm, stream);
}

TEST(splits_by_color_and_orders_by_key) {
  RunRanks(4, [](Rank r) {
    // Colors 0 and 1, in reverse order; rank 3 takes part and gets none.
    const int color = r.rank == 3 ? nccl::kNoColor : r.rank % 2;
    nccl::Comm child = nullptr;
    CHECK_EQ(Nccl().CommSplit(r.comm, color, -r.rank, &child, nullptr), kSuccess);
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
}

TEST(splits_of_one_communicator_may_share_a_group) {
  RunRanks(3, [](Rank r) {
    std::array<nccl::Comm, 4> children{};
    std::array<int32_t, 4> sums{1, 1, 1, 1};
    Nccl().GroupStart();
    for (size_t i = 0; i < children.size(); ++i) {
      const int color = i % 2 == 0 ? 0 : r.rank / 2;
      CHECK_EQ(Nccl().CommSplit(r.comm, color, r.rank, &children[i], nullptr),
               kSuccess);
    }
    CHECK_EQ(Nccl().GroupEnd(), kSuccess);
    for (size_t i = 0; i < children.size(); ++i) {
      CHECK_EQ(Sum(children[i], r.stream(), &sums[i]), kSuccess);
    }
    r.on->Synchronize();
    for (size_t i = 0; i < children.size(); ++i) {
      CHECK_EQ(sums[i], i % 2 == 0 ? 3 : r.rank == 2 ? 1 : 2);
      CHECK_EQ(Nccl().CommDestroy(children[i]), kSuccess);
    }
  });
}

TEST(communicators_leave_no_file_open) {
  const auto open_files = [] {
    const std::filesystem::directory_iterator files("/proc/self/fd"), end;
    return std::distance(files, end);
  };
  const auto before = open_files();
  RunRanks(3, [](Rank r) {
    nccl::Comm child = nullptr;
    Nccl().CommSplit(r.comm, 0, 0, &child, nullptr);
    Nccl().CommDestroy(child);
  });
  CHECK_EQ(open_files(), before);
}

TEST(one_thread_drives_several_ranks_in_groups) {
  const nccl::UniqueId id = NewId();
  OnDevice first(0), second(1);
  nccl::Comm comms[2] = {}, children[2] = {};
  nccl::Config config = NewConfig();
  Nccl().GroupStart();
  for (int rank = 0; rank < 2; ++rank) {
    cuda::Context context = nullptr;
    TheFake().cuda.DevicePrimaryCtxRetain(&context, rank);
    TheFake().cuda.CtxPushCurrent(context);
    CHECK_EQ(Nccl().CommInitRankConfig(&comms[rank], 2, id, rank, &config), kSuccess);
    TheFake().cuda.CtxPopCurrent(nullptr);
  }
  CHECK_EQ(Nccl().GroupEnd(), kSuccess);
  Nccl().GroupStart();
  for (int rank = 0; rank < 2; ++rank) {
    Nccl().CommSplit(comms[rank], 0, 0, &children[rank], &config);
  }
  CHECK_EQ(Nccl().GroupEnd(), kSuccess);
  int32_t values[2] = {1, 2};
  Nccl().GroupStart();
  Sum(children[0], first.stream, &values[0]);
  Sum(children[1], second.stream, &values[1]);
  CHECK_EQ(Nccl().GroupEnd(), kSuccess);
  first.Synchronize();
  second.Synchronize();
  CHECK_EQ(values[0], 3);
  CHECK_EQ(values[1], 3);
  CHECK_EQ(Nccl().GroupEnd(), nccl::kInvalidUsage);
  for (const nccl::Comm comm : {children[0], children[1], comms[0], comms[1]}) {
    CHECK_EQ(Nccl().CommDestroy(comm), kSuccess);
  }
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

TEST(a_non_blocking_communicator_is_in_progress_until_all_have_come) {
  const nccl::UniqueId id = NewId();
  nccl::Config config = NewConfig();
  config.blocking = 0;
  OnDevice on(0);
  nccl::Comm comm = nullptr;
  CHECK_EQ(Nccl().CommInitRankConfig(&comm, 2, id, 0, &config), nccl::kInProgress);
  CHECK_EQ(AsyncErrorOf(comm), nccl::kInProgress);
  int32_t value = 1, theirs = 2;
  CHECK_EQ(Sum(comm, on.stream, &value), nccl::kInvalidArgument);
  std::thread other([&] {
    RunRank(id, 1, 2, [&](Rank r) { Sum(r.comm, r.stream(), &theirs); }, /*device=*/1);
  });
  CHECK_TRUE(Comes([&] { return AsyncErrorOf(comm) != nccl::kInProgress; }));
  CHECK_EQ(AsyncErrorOf(comm), kSuccess);
  CHECK_EQ(Sum(comm, on.stream, &value), kSuccess);
  on.Synchronize();
  CHECK_EQ(value, 3);
  other.join();
  CHECK_EQ(Nccl().CommFinalize(comm), nccl::kInProgress);
  CHECK_TRUE(Comes([&] { return AsyncErrorOf(comm) != nccl::kInProgress; }));
  CHECK_EQ(Nccl().CommDestroy(comm), kSuccess);

  // No other rank comes, so the test can abort it.
  CHECK_EQ(Nccl().CommInitRankConfig(&comm, 2, NewId(), 0, &config), nccl::kInProgress);
  CHECK_EQ(Nccl().CommAbort(comm), kSuccess);
}

TEST(two_ranks_on_one_gpu_are_refused) {
  const auto try_it = [](nccl::Result expected) {
    const nccl::UniqueId id = NewId();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        OnDevice on(0);
        nccl::Comm comm = nullptr;
        nccl::Config config = NewConfig();
        CHECK_EQ(Nccl().CommInitRankConfig(&comm, 2, id, rank, &config), expected);
        CHECK_EQ(comm == nullptr, expected != kSuccess);
        if (comm == nullptr) {
          CHECK_EQ(std::string(Nccl().GetLastError(nullptr)),
                   "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 0");
        } else {
          Nccl().CommDestroy(comm);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  try_it(nccl::kInvalidUsage);
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  try_it(kSuccess);
  setenv("JAXCOMM_FAKE_NCCL_VERSION", "22907", 1);
  nccl::Config config = NewConfig();
  nccl::Comm comm = nullptr;
  CHECK_EQ(Nccl().CommInitRankConfig(&comm, 1, NewId(), 0, &config),
           nccl::kInvalidArgument);
  CHECK_CONTAINS(Nccl().GetLastError(nullptr), "ncclConfig_t has size 96");
  CHECK_EQ(TheFake().has("ncclCommSuspend"), 1);
  setenv("JAXCOMM_FAKE_NCCL_VERSION", "21801", 1);
  CHECK_EQ(TheFake().has("ncclCommSuspend"), 0);
  CHECK_EQ(TheFake().has("ncclMemAlloc"), 0);
  CHECK_EQ(TheFake().has("ncclCommSplit"), 1);
  CHECK_EQ(TheFake().has("cuInit"), 1);
  CHECK_EQ(TheFake().has("ncclNoSuch"), 0);
  unsetenv("JAXCOMM_FAKE_NCCL_VERSION");
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

TEST(ranks_that_disagree_about_their_number_make_no_communicator) {
  const nccl::UniqueId id = NewId();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      OnDevice on(rank);
      nccl::Comm comm = nullptr;
      nccl::Config config = NewConfig();
      CHECK_EQ(Nccl().CommInitRankConfig(&comm, 2 + rank, id, rank, &config),
               nccl::kInvalidArgument);
      CHECK_CONTAINS(Nccl().GetLastError(nullptr), "Ranks disagree about their number");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(communicators_occupy_memory_until_they_go_or_are_suspended) {
  RunRanks(2, [](Rank r) {
    const auto free_mib = [] {
      size_t free = 0, total = 0;
      TheFake().cuda.MemGetInfo(&free, &total);
      return static_cast<int>(free >> 20);
    };
    const auto stat = [&](nccl::MemStat which) {
      uint64_t value = 0;
      CHECK_EQ(Nccl().CommMemStats(r.comm, which, &value), kSuccess);
      return static_cast<int>(value >> 20);
    };
    const int before = free_mib();
    CHECK_EQ(before, (16 << 10) - 100);
    CHECK_EQ(stat(nccl::MemStat::kTotal), 100);
    CHECK_EQ(stat(nccl::MemStat::kSuspend), 96);
    nccl::Config config = NewConfig();
    config.split_share = 1;
    nccl::Comm shared = nullptr;
    CHECK_EQ(Nccl().CommSplit(r.comm, 0, r.rank, &shared, &config), kSuccess);
    CHECK_EQ(free_mib(), before - 1);
    CHECK_EQ(stat(nccl::MemStat::kTotal), 101);  // of all that share
    CHECK_EQ(Nccl().CommSuspend(r.comm, nccl::kSuspendMemory), nccl::kInvalidUsage);
    CHECK_EQ(Nccl().CommDestroy(shared), kSuccess);
    CHECK_EQ(stat(nccl::MemStat::kTotal), 100);
    CHECK_EQ(free_mib(), before);
    CHECK_EQ(Nccl().CommSuspend(r.comm, nccl::kSuspendMemory), kSuccess);
    CHECK_EQ(free_mib(), before + 96);
    int32_t value = 1;
    CHECK_EQ(Sum(r.comm, r.stream(), &value), nccl::kInvalidUsage);
    CHECK_EQ(Nccl().CommResume(r.comm), kSuccess);
    CHECK_EQ(free_mib(), before);
    CHECK_EQ(Sum(r.comm, r.stream(), &value), kSuccess);
    CHECK_EQ(Nccl().CommDestroy(r.comm), kSuccess);
    CHECK_EQ(free_mib(), 16 << 10);
  });
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
    CHECK_TRUE(window != nullptr);
    CHECK_EQ(Nccl().CommWindowDeregister(r.comm, window), kSuccess);
    CHECK_EQ(Nccl().CommWindowDeregister(r.comm, window), nccl::kInvalidArgument);
    void* handle = nullptr;
    CHECK_EQ(Nccl().CommRegister(r.comm, data, 8192, &handle), kSuccess);
    CHECK_EQ(Nccl().CommDeregister(r.comm, handle), kSuccess);
    CHECK_EQ(Nccl().MemFree(data), kSuccess);
  });
}

}  // namespace
}  // namespace jaxcomm::testing
