// The stand-in for libnccl with ranks as processes.
#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/ffi/check.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {
namespace {

using nccl::kSuccess;
using nccl::RedOp;
using nccl::Type;

const nccl::Api& Nccl() { return TheFake().nccl; }

constexpr int kSize = 3;

// Runs `body` in processes and returns how they ended. This process has no threads, so
// that it may fork.
std::vector<int> Fork(int processes, const std::function<void(int)>& body) {
  std::vector<pid_t> pids;
  std::fflush(nullptr);
  for (int process = 0; process < processes; ++process) {
    const pid_t pid = fork();
    if (pid == 0) {
      body(process);
      std::fflush(nullptr);
      _exit(Failures() == 0 ? EXIT_SUCCESS : EXIT_FAILURE);
    }
    pids.push_back(pid);
  }
  std::vector<int> statuses;
  for (const pid_t pid : pids) {
    int status = -1;
    waitpid(pid, &status, 0);
    statuses.push_back(status);
  }
  return statuses;
}

// One rank in each, on its own device 0.
std::vector<int> RunProcesses(const std::function<void(Rank)>& body) {
  const nccl::UniqueId id = NewId();
  return Fork(kSize, [&](int rank) { RunRank(id, rank, kSize, body, /*device=*/0); });
}

std::vector<std::string> SharedMemoryFiles() {
  std::vector<std::string> names;
  DIR* const folder = opendir("/dev/shm");
  if (folder == nullptr) return names;
  while (const dirent* const entry = readdir(folder)) {
    if (std::string(entry->d_name).find("fake") != std::string::npos) {
      names.push_back(entry->d_name);
    }
  }
  closedir(folder);
  return names;
}

// First, because the environment is read once.
TEST(faults_can_come_from_the_environment) {
  setenv("JAXCOMM_FAKE_FAULTS", "ncclGetVersion:1:2,ncclSend:0:die", 1);
  const std::vector<int> statuses = Fork(1, [](int) {
    int version = 0;
    CHECK_EQ(Nccl().GetVersion(&version), kSuccess);
    CHECK_EQ(version, 23203);
    CHECK_EQ(Nccl().GetVersion(&version), nccl::kSystemError);
    CHECK_EQ(Nccl().GetVersion(&version), kSuccess);
    if (Failures() == 0) Nccl().Send(nullptr, 0, Type::kInt8, 0, nullptr, nullptr);
  });
  unsetenv("JAXCOMM_FAKE_FAULTS");
  CHECK_TRUE(WIFSIGNALED(statuses[0]));
  CHECK_EQ(WTERMSIG(statuses[0]), SIGKILL);
}

TEST(processes_compute_together_and_leave_nothing) {
  const auto body = [](Rank r) {
    constexpr size_t kCount = 300000;  // more than one page of anything
    const auto value = [](int rank, size_t i) {
      return static_cast<int32_t>(rank * 1000 + i % 977);
    };
    std::vector<int32_t> mine, sum(kCount), received(kCount), gathered(kCount * kSize);
    for (size_t i = 0; i < kCount; ++i) mine.push_back(value(r.rank, i));
    Nccl().AllReduce(mine.data(), sum.data(), kCount, Type::kInt32, RedOp::kSum, r.comm,
                     r.stream());
    Nccl().AllGather(mine.data(), gathered.data(), kCount, Type::kInt32, r.comm,
                     r.stream());
    Nccl().GroupStart();
    Nccl().Send(mine.data(), kCount, Type::kInt32, (r.rank + 1) % kSize, r.comm,
                r.stream());
    const int left = (r.rank + kSize - 1) % kSize;
    Nccl().Recv(received.data(), kCount, Type::kInt32, left, r.comm, r.stream());
    Nccl().GroupEnd();
    r.on->Synchronize();
    for (size_t i = 0; i < kCount; i += 101) {
      CHECK_EQ(sum[i], value(0, i) + value(1, i) + value(2, i));
      CHECK_EQ(received[i], value(left, i));
      for (int rank = 0; rank < kSize; ++rank) {
        CHECK_EQ(gathered[static_cast<size_t>(rank) * kCount + i], value(rank, i));
      }
    }
    nccl::Comm child = nullptr;
    CHECK_EQ(Nccl().CommSplit(r.comm, r.rank == 0 ? 1 : 0, 0, &child, nullptr),
             kSuccess);
    int32_t one = 1;
    Nccl().AllReduce(&one, &one, 1, Type::kInt32, RedOp::kSum, child, r.stream());
    r.on->Synchronize();
    CHECK_EQ(one, r.rank == 0 ? 1 : 2);
    CHECK_EQ(Nccl().CommDestroy(child), kSuccess);
    CHECK_EQ(Nccl().CommDestroy(r.comm), kSuccess);
  };
  CHECK_TRUE(SharedMemoryFiles().empty());
  for (const int status : RunProcesses(body)) CHECK_EQ(status, 0);
  CHECK_TRUE(SharedMemoryFiles().empty());
}

TEST(ranks_may_be_threads_of_several_processes) {
  const nccl::UniqueId id = NewId();
  for (const int status : Fork(2, [&](int process) {
         std::vector<std::thread> threads;
         for (int device = 0; device < 2; ++device) {
           const auto body = [](Rank r) {
             int32_t value = 1 << r.rank;
             Nccl().AllReduce(&value, &value, 1, Type::kInt32, RedOp::kSum, r.comm,
                              r.stream());
             r.on->Synchronize();
             CHECK_EQ(value, 15);
           };
           threads.emplace_back([&id, process, device, body] {
             RunRank(id, process * 2 + device, 4, body, device);
           });
         }
         for (std::thread& thread : threads) thread.join();
       })) {
    CHECK_EQ(status, 0);
  }
}

TEST(devices_of_processes_can_be_one_gpu) {
  setenv("JAXCOMM_FAKE_ONE_GPU", "1", 1);
  const nccl::UniqueId id = NewId();
  for (const int status : Fork(2, [&](int rank) {
         OnDevice on(0);
         nccl::Comm comm = nullptr;
         nccl::Config config = NewConfig();
         CHECK_EQ(Nccl().CommInitRankConfig(&comm, 2, id, rank, &config),
                  nccl::kInvalidUsage);
         CHECK_CONTAINS(Nccl().GetLastError(nullptr), "Duplicate GPU detected");
       })) {
    CHECK_EQ(status, 0);
  }
  unsetenv("JAXCOMM_FAKE_ONE_GPU");
}

// NCCL's kernels within a host behave so: only an abort ends them, and they wrote
// nothing.
TEST(nobody_is_told_of_a_dead_process_in_an_operation) {
  int made[2];
  CHECK_EQ(pipe(made), 0);
  const std::vector<int> statuses = RunProcesses([&](Rank r) {
    char byte = 0;
    if (r.rank == 1) {
      // Whoever still makes its communicator would be told.
      for (int other = 0; other < kSize - 1; ++other)
        CHECK_EQ(read(made[0], &byte, 1), 1);
      raise(SIGKILL);
    }
    CHECK_EQ(write(made[1], &byte, 1), 1);
    int32_t value = 1;
    Nccl().AllReduce(&value, &value, 1, Type::kInt32, RedOp::kSum, r.comm, r.stream());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK_EQ(AsyncErrorOf(r.comm), kSuccess);
    CHECK_EQ(Nccl().CommAbort(r.comm), kSuccess);
    CHECK_EQ(r.on->Synchronize(), cuda::kSuccess);
    CHECK_EQ(value, 1);
  });
  for (const int end : made) close(end);
  CHECK_EQ(statuses[0], 0);
  CHECK_EQ(WTERMSIG(statuses[1]), SIGKILL);
  CHECK_EQ(statuses[2], 0);
}

TEST(processes_that_disagree_have_an_asynchronous_error) {
  for (const int status : RunProcesses([](Rank r) {
         int32_t value = 1;
         Nccl().Broadcast(&value, &value, 1, Type::kInt32, r.rank == 2 ? 1 : 0, r.comm,
                          r.stream());
         while (AsyncErrorOf(r.comm) == kSuccess) std::this_thread::yield();
         CHECK_CONTAINS(Nccl().GetLastError(r.comm), "root 0 against 1");
         CHECK_EQ(Nccl().CommAbort(r.comm), kSuccess);
       })) {
    CHECK_EQ(status, 0);
  }
}

}  // namespace
}  // namespace jaxcomm::testing
