// Memory that processes show each other: what is freed, and when, if one of them is
// interrupted while a communicator is made.
#include <poll.h>

#include <atomic>
#include <memory>
#include <string>

#include "ffi/backends/nccl/engines/device_arena.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

Pipe *has_come = nullptr, *is_gone = nullptr, *has_left = nullptr;
int last_exchange = 0;  // of the infos, in which one process is interrupted
std::atomic<int> exchanges{0};
std::atomic<bool> is_freed{false};

// Makes a communicator of which one process is interrupted, and frees it. Returns
// whether it was made.
bool MakeInterrupted(const nccl::UniqueId& id, int rank, NcclLibrary library) {
  library.cuda.MemFreeHost = [](void* memory) {
    is_freed = true;  // behind what other processes map
    return Cuda().MemFreeHost(memory);
  };
  auto kept = std::make_unique<NcclLibrary>(library);
  const NcclLibrary& own = *kept;
  KeepForever(std::move(kept));
  const auto world = Must(NcclWorld::Create(own, 2, {{100 + rank, rank, rank}},
                                            {id.internal, sizeof(id.internal)}, {},
                                            {kHangSeconds}, {}));
  NcclSpec how{world, {}, {kHangSeconds}, {}, OnFailure::kPoison};
  how.engines.copy_engines = true;
  how.patience.interrupted = [] {
    pollfd gone{is_gone->ends[0], POLLIN, 0};
    return poll(&gone, 1, 0) > 0;
  };
  CommunicatorSpec spec = Spec({{100, 101}}, kHangSeconds);
  spec.platform = "gpu";
  auto made = MakeNcclCommunicator(std::move(spec), how);
  if (made) {
    CHECK_EQ(last_exchange, 3);
    has_come->Tell();
    is_gone->Wait();
    *made = nullptr;
  }
  CHECK_TRUE(Until([] { return is_freed.load(); }));
  return made.has_value();
}

// One process is interrupted before it has what the other sent. The other has that
// one's infos by then, and has mapped its memory if they had the handle.
void CheckInterrupted(int last) {
  last_exchange = last;
  has_come = new Pipe;
  is_gone = new Pipe;
  has_left = new Pipe;
  const nccl::UniqueId id = NewId();
  Child interrupted([&] {
    NcclLibrary library = Library();
    library.cuda.MemcpyDtoHAsync = [](void* to, cuda::Pointer from, size_t bytes,
                                      cuda::Stream stream) {
      if (++exchanges < last_exchange) {
        return Cuda().MemcpyDtoHAsync(to, from, bytes, stream);
      }
      has_come->Wait();
      return cuda::kInvalidValue;
    };
    CHECK_TRUE(!MakeInterrupted(id, 1, library));
    // The other maps it still, from the second exchange on.
    CHECK_EQ(DeviceArena::TotalBytes() > 0, last_exchange > 1);
    is_gone->Tell();
    has_left->Wait();
    CHECK_EQ(DeviceArena::TotalBytes(), 0);
    CHECK_EQ(std::string(TheFake().misuse()), "");
  });
  NcclLibrary library = Library();
  library.cuda.MemcpyHtoDAsync = [](cuda::Pointer to, const void* from, size_t bytes,
                                    cuda::Stream stream) {
    if (exchanges++ == last_exchange) has_come->Tell();
    return Cuda().MemcpyHtoDAsync(to, from, bytes, stream);
  };
  CHECK_EQ(MakeInterrupted(id, 0, library), last == 3);
  // That one did not get to know where to say that it has left in the first.
  CHECK_EQ(DeviceArena::TotalBytes() > 0, last == 1);
  has_left->Tell();
  CHECK_EQ(interrupted.Wait(), EXIT_SUCCESS);
  CHECK_EQ(DeviceArena::TotalBytes(), 0);
}

TEST_ALONE(who_is_interrupted_before_it_knows_the_others_has_shown_nothing,
           EXIT_SUCCESS) {
  CheckInterrupted(1);
}

TEST_ALONE(memory_is_not_freed_that_another_process_is_mapping, EXIT_SUCCESS) {
  CheckInterrupted(2);
}

TEST_ALONE(who_is_interrupted_last_tells_the_others_that_it_has_left, EXIT_SUCCESS) {
  CheckInterrupted(3);
}

// NCCL has the streams by then, and keeps them until it is aborted.
TEST_ALONE(memory_comes_back_where_the_first_use_is_interrupted, EXIT_SUCCESS) {
  is_gone = new Pipe;
  const nccl::UniqueId id = NewId();
  NcclLibrary library = Library();
  library.nccl.AllReduce = [](const void* from, void* to, size_t count, nccl::Type type,
                              nccl::RedOp op, nccl::Comm comm, nccl::Stream stream) {
    TheFake().hang("ncclAllReduce", 0);
    const nccl::Result given =
        Nccl().AllReduce(from, to, count, type, op, comm, stream);
    is_gone->Tell();
    return given;
  };
  const auto run = [&](int rank) {
    CHECK_TRUE(!MakeInterrupted(id, rank, library));
    CHECK_EQ(DeviceArena::TotalBytes(), 0);
  };
  Child other([&] {
    run(1);
    CHECK_EQ(std::string(TheFake().misuse()), "");
  });
  run(0);
  CHECK_EQ(other.Wait(), EXIT_SUCCESS);
}

}  // namespace
}  // namespace jaxcomm::testing
