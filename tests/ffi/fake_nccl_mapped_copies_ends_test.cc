// Copies between processes that fail or end: what is released after a failure, and when
// memory is freed.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "ffi/backends/nccl/engines/device_arena.h"
#include "tests/ffi/mapped_processes.h"

namespace jaxcomm::testing {
namespace {

bool HasThread(const std::string& name) {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string found;
    std::getline(std::ifstream(task.path() / "comm"), found);
    if (found == name) return true;
  }
  return false;
}

std::atomic<bool> is_launching{false}, holds_launch{false}, is_aborted{false};
std::atomic<int> releases{0};
Event goes_on;

// The failure comes while a thread gives the stream what waits for the other.
TEST_ALONE(what_is_launched_beside_a_failure_is_released, EXIT_SUCCESS) {
  const nccl::UniqueId id = NewId();
  Pipe ends;
  const auto hop = Hop({1, 0});
  Child other([&] {
    new Process(id, {1}, 2, Library());  // ends with this process
    ends.Wait();
  });
  NcclLibrary library = Library();
  library.cuda.StreamBatchMemOp = [](cuda::Stream stream, unsigned count,
                                     cuda::MemoryOperation* words, unsigned flags) {
    if (words[0].value == uint64_t{1} << 62) ++releases;
    if (holds_launch.exchange(false)) {
      is_launching = true;
      goes_on.Wait();
    }
    return Cuda().StreamBatchMemOp(stream, count, words, flags);
  };
  library.nccl.CommAbort = [](nccl::Comm comm) {
    is_aborted = true;
    return Nccl().CommAbort(comm);
  };
  Process own(id, {0}, 2, library, kExpires);
  Part part(0, hop.get());
  holds_launch = true;
  std::thread launches([&] { (void)part.Enqueue(*own.communicator); });
  CHECK_TRUE(Until([] { return is_launching.load(); }));
  CHECK_TRUE(Until([&] { return own.world->health()->is_broken(); }));
  ends.Tell();
  CHECK_EQ(other.Wait(), EXIT_SUCCESS);
  own.world->health()->Settle();
  CHECK_TRUE(Until(
      [] { return releases > 1 || (is_aborted && !HasThread("jaxcomm-release")); }));
  goes_on.Set();
  launches.join();
  CHECK_TRUE(
      Until([&] { return Cuda().StreamQuery(part.on.stream) == cuda::kSuccess; }));
  CHECK_TRUE(std::isnan(part.result[0]));
}

// Staging is ahead of what the others pull, and waits for them in another stream than
// the program's.
TEST_ALONE(more_than_the_slots_hold_is_released, EXIT_SUCCESS) {
  const nccl::UniqueId id = NewId();
  Pipe ends;
  const auto exchange = Exchange(2, 68);  // five slots
  Child other([&] {
    new Process(id, {1}, 2, Library());  // ends with this process
    ends.Wait();
  });
  Process own(id, {0}, 2, Library(), kExpires);
  Part part(0, exchange.get());
  CHECK_OK(part.Enqueue(*own.communicator));
  CHECK_TRUE(Until([&] { return own.world->health()->is_broken(); }));
  ends.Tell();
  CHECK_EQ(other.Wait(), EXIT_SUCCESS);
  own.world->health()->Settle();
  CHECK_TRUE(
      Until([&] { return Cuda().StreamQuery(part.on.stream) == cuda::kSuccess; }));
  CHECK_TRUE(std::isnan(part.result[0]));
}

Gate first_copy;
std::atomic<int> copies{0};

// XLA gives operands back behind the program's stream, also after a failure.
TEST_ALONE(a_launch_that_fails_waits_for_what_reads_its_operands, EXIT_SUCCESS) {
  const nccl::UniqueId id = NewId();
  Pipe ends;
  const auto exchange = Exchange(2, 20);  // two slots
  Child other([&] {
    new Process(id, {1}, 2, Library());  // ends with this process
    ends.Wait();
  });
  NcclLibrary library = Library();
  library.cuda.MemcpyDtoDAsync = [](cuda::Pointer to, cuda::Pointer from, size_t bytes,
                                    cuda::Stream stream) {
    const int before = copies++;
    if (before == 0) first_copy.Hold(stream);
    if (before == 1) return cuda::kInvalidValue;
    return Cuda().MemcpyDtoDAsync(to, from, bytes, stream);
  };
  Process own(id, {0}, 2, library);
  Part part(0, exchange.get());
  CHECK_TRUE(part.Enqueue(*own.communicator).failure());
  const Milestone given_back(part.on.stream);
  LetOthersRun();
  CHECK_TRUE(!given_back.passed());
  first_copy.Open();
  part.on.Synchronize();
  CHECK_TRUE(given_back.passed());
  ends.Tell();
  CHECK_EQ(other.Wait(), EXIT_SUCCESS);
}

std::atomic<cuda::Stream> of_words{nullptr};  // the last one that waits for a word

// By then the stream waits for a word of the other, which never comes.
TEST_ALONE(a_launch_that_fails_leaves_no_stream_waiting, EXIT_SUCCESS) {
  const nccl::UniqueId id = NewId();
  Pipe ends;
  const auto exchange = Exchange(2, 20);  // two slots
  Child other([&] {
    new Process(id, {1}, 2, Library());  // ends with this process
    ends.Wait();
  });
  NcclLibrary library = Library();
  library.cuda.StreamBatchMemOp = [](cuda::Stream stream, unsigned count,
                                     cuda::MemoryOperation* words, unsigned flags) {
    if (words[count - 1].kind == cuda::MemoryOperation::kWait) of_words = stream;
    return Cuda().StreamBatchMemOp(stream, count, words, flags);
  };
  library.cuda.MemcpyDtoDAsync = [](cuda::Pointer to, cuda::Pointer from, size_t bytes,
                                    cuda::Stream stream) {
    if (stream == of_words) return cuda::kInvalidValue;
    return Cuda().MemcpyDtoDAsync(to, from, bytes, stream);
  };
  library.cuda.Memcpy2DAsync = [](const cuda::Rows* rows, cuda::Stream stream) {
    return stream == of_words ? cuda::kInvalidValue
                              : Cuda().Memcpy2DAsync(rows, stream);
  };
  Process own(id, {0}, 2, library);
  Part part(0, exchange.get());
  of_words = nullptr;
  CHECK_FAILS(part.Enqueue(*own.communicator), "cuMemcpy");
  CHECK_TRUE(of_words != nullptr);
  ends.Tell();
  CHECK_EQ(other.Wait(), EXIT_SUCCESS);
  own.world->health()->Settle();
  CHECK_TRUE(
      Until([&] { return Cuda().StreamQuery(part.on.stream) == cuda::kSuccess; }));
  for (const auto& entry : own.communicator->recorder().Snapshot()) {
    CHECK_TRUE(entry.state == FlightRecorder::State::kFailed);
  }
}

Pipe *closes = nullptr, *may_close = nullptr;

// CUDA does not define what happens if memory is freed that another process has mapped,
// so one that is late with closing it finds it as it was.
TEST_ALONE(memory_is_freed_once_no_other_process_has_it_mapped, EXIT_SUCCESS) {
  closes = new Pipe;
  may_close = new Pipe;
  const nccl::UniqueId id = NewId();
  const auto hop = Hop({1, 0});
  Child late([&] {
    NcclLibrary library = Library();
    library.cuda.IpcCloseMemHandle = [](cuda::Pointer memory) {
      closes->Tell();
      may_close->Wait();
      return Cuda().IpcCloseMemHandle(memory);
    };
    auto* const own = new Process(id, {1}, 2, library);
    Part part(1, hop.get());
    own->Enqueue(part, part);
    part.on.Synchronize();
    own->communicator = nullptr;
    CHECK_EQ(std::string(TheFake().misuse()), "");
  });
  Process own(id, {0}, 2, Library());
  Part part(0, hop.get());
  own.Enqueue(part, part);
  part.on.Synchronize();
  closes->Wait();
  own.communicator = nullptr;
  CHECK_TRUE(DeviceArena::TotalBytes() > 0);
  may_close->Tell();
  CHECK_EQ(late.Wait(), EXIT_SUCCESS);
  CHECK_EQ(DeviceArena::TotalBytes(), 0);
}

}  // namespace
}  // namespace jaxcomm::testing
