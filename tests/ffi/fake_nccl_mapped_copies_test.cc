// Copies between processes, by memory that they have mapped: in which order slots are
// staged in and read, what is released after a failure, and when memory is freed.
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "ffi/backends/nccl/engines/device_arena.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

constexpr int64_t kRow = 128 << 10;  // floats
constexpr int kSlots = 4;

// Staged in a rank's own memory, since NCCL would send packed rows. A rank sends
// `rows` to each.
std::unique_ptr<CallSite> Exchange(int size, int64_t rows) {
  const Leaf leaf = FloatLeaf(size * rows * kRow);
  return MakeSite("all_to_all", {1, rows, 1}, {leaf}, {leaf, leaf});
}

// Staged in the memory of the one that a rank sends to.
std::unique_ptr<CallSite> Hop(std::vector<int64_t> sources) {
  return FloatSite("permute", std::move(sources), 8 * kRow);
}

// Whether a rank has all that another sent it by an exchange.
bool HasRows(const Part& part, int size, const Part& source) {
  const auto rows = static_cast<int64_t>(part.result.size()) / kRow / size;
  for (int64_t row = 0; row < rows; ++row) {
    if (!Holds(part, (row * size + source.device) * kRow, source,
               (part.device * rows + row) * kRow, kRow)) {
      return false;
    }
  }
  return true;
}

// One of the processes, with some ranks.
struct Process {
  Process(const nccl::UniqueId& id, const std::vector<int>& ranks, int size,
          const NcclLibrary& library, double timeout = kHangSeconds) {
    std::vector<NcclDevice> devices;
    for (int rank : ranks) devices.push_back({100 + rank, rank, rank});
    Options options;
    options.size = size;
    options.copies = true;
    options.library = library;
    options.timeout = timeout;
    // As long as the process lives: what stops the devices refers to it.
    auto kept = std::make_unique<NcclLibrary>(library);
    const NcclLibrary& own = *kept;
    KeepForever(std::move(kept));
    world =
        Must(NcclWorld::Create(own, size, devices, {id.internal, sizeof(id.internal)},
                               {}, {kHangSeconds}, {}));
    communicator = Make(options, world);
    CHECK_EQ(NcclStatsOf(*communicator).copies, "yes");
  }

  // On one stream, as all calls of a program.
  void Enqueue(const Part& part, const Part& of) {
    CHECK_OK(communicator->Enqueue(part.CallOf(), of.on.stream));
  }

  std::shared_ptr<NcclWorld> world;
  std::shared_ptr<Communicator> communicator;
};

// Waits of streams for words, as they begin and end.
struct Waits {
  using Operation = cuda::MemoryOperation;
  struct One {
    cuda::Stream stream;
    Operation operation;
  };

  // The same as CUDA's, one by one.
  static cuda::Result Give(cuda::Stream stream, unsigned count, Operation* operations,
                           unsigned flags) {
    for (unsigned i = 0; i < count; ++i) {
      const bool is_wait = operations[i].kind == Operation::kWait;
      auto* const one = new One{stream, operations[i]};
      if (is_wait) Cuda().LaunchHostFunc(stream, &Begin, one);
      const cuda::Result given =
          Cuda().StreamBatchMemOp(stream, 1, &operations[i], flags);
      if (given != cuda::kSuccess) return given;
      Cuda().LaunchHostFunc(stream, &End, one);
    }
    return cuda::kSuccess;
  }
  static void Begin(void* data) {
    const One& one = *static_cast<One*>(data);
    std::lock_guard<std::mutex> lock(mutex);
    all[one.stream] = one.operation;
  }
  static void End(void* data) {
    std::unique_ptr<One> one(static_cast<One*>(data));
    std::lock_guard<std::mutex> lock(mutex);
    all.erase(one->stream);
  }

  // Whether there was a moment at which all of these waited. Words only grow: one that
  // is too small was so before.
  static bool AreStuck(const std::vector<cuda::Stream>& streams) {
    std::vector<Operation> found;
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (cuda::Stream stream : streams) {
        if (all.count(stream) == 0) return false;
        found.push_back(all[stream]);
      }
    }
    return std::all_of(found.begin(), found.end(), [](const Operation& wait) {
      return __atomic_load_n(reinterpret_cast<uint64_t*>(wait.address),
                             __ATOMIC_ACQUIRE) < wait.value;
    });
  }

  static inline std::mutex mutex;
  static inline std::map<cuda::Stream, Operation> all;
};

Pipe* reads = nullptr;  // the late one may

// A slot in which a rank staged is filled by another one only when all have read it.
// The late one does once the others are through, or can go no further without it.
TEST_ALONE(nobody_stages_over_what_a_late_rank_reads, EXIT_SUCCESS) {
  constexpr int kSize = 3;
  reads = new Pipe;
  const nccl::UniqueId id = NewId();
  const auto exchange = Exchange(kSize, 6), hop = Hop({2, -1, -1});
  Child late([&] {
    NcclLibrary library = Library();
    library.cuda.StreamBatchMemOp = [](cuda::Stream stream, unsigned count,
                                       cuda::MemoryOperation* words, unsigned flags) {
      const cuda::Result given = Cuda().StreamBatchMemOp(stream, count, words, flags);
      static bool is_held = false;
      if (words[count - 1].kind == cuda::MemoryOperation::kWait && !is_held) {
        is_held = true;
        Cuda().LaunchHostFunc(stream, [](void*) { reads->Wait(); }, nullptr);
      }
      return given;
    };
    auto* const own = new Process(id, {1}, kSize, library);  // ends with this process
    Part part(1, exchange.get()), nothing(1, hop.get());
    own->Enqueue(part, part);
    for (int i = 0; i < kSlots; ++i) own->Enqueue(nothing, part);
    part.on.Synchronize();
    for (int source : {0, 2}) {
      CHECK_TRUE(HasRows(part, kSize, Part(source, exchange.get())));
    }
  });
  NcclLibrary library = Library();
  library.cuda.StreamBatchMemOp = &Waits::Give;
  Process own(id, {0, 2}, kSize, library);
  Part first(0, exchange.get()), last(2, exchange.get());
  Part taken(0, hop.get()), sent(2, hop.get());
  own.Enqueue(first, first);
  own.Enqueue(last, last);
  // From here on the late one is all that can let them go on.
  for (const Part* part : {&first, &last}) part->on.Synchronize();
  for (int i = 0; i < kSlots; ++i) {
    own.Enqueue(taken, first);
    own.Enqueue(sent, last);
  }
  CHECK_TRUE(Until([&] {
    return Cuda().StreamQuery(last.on.stream) == cuda::kSuccess ||
           Waits::AreStuck({first.on.stream, last.on.stream});
  }));
  reads->Tell();
  CHECK_EQ(late.Wait(), EXIT_SUCCESS);
  for (const Part* part : {&first, &last}) {
    part->on.Synchronize();
    CHECK_TRUE(HasRows(*part, kSize, Part(1, exchange.get())));
  }
  CHECK_TRUE(Holds(taken, 0, sent, 0, 8 * kRow));
}

Gate staging;
std::atomic<bool> holds_copy{false};
std::atomic<int> waits{0};  // of the program's stream, for events
std::atomic<cuda::Stream> of_program{nullptr};

// Between start and done a program's stream goes on, and with it the next calls. They
// come behind what was started: a word of theirs would say that it was staged.
TEST_ALONE(what_was_started_comes_before_later_calls, EXIT_SUCCESS) {
  const nccl::UniqueId id = NewId();
  const auto exchange = Exchange(2, 20), hop = Hop({-1, 0});  // two slots, and one
  const auto run = [&](Process& own, Part& part, Part& hopping) {
    of_program = part.on.stream;
    CHECK_OK(part.Start(*own.communicator));
    for (int i = 0; i < kSlots; ++i) own.Enqueue(hopping, part);
  };
  const auto check = [&](Process& own, Part& part, Part& hopping) {
    CHECK_OK(part.Done(*own.communicator));
    part.on.Synchronize();
    CHECK_TRUE(HasRows(part, 2, Part(1 - part.device, exchange.get())));
    const float sent = part.device == 1 ? 1 : 0;
    CHECK_EQ(hopping.result[1], sent);
  };
  Child other([&] {
    auto* const own = new Process(id, {1}, 2, Library());  // ends with this process
    Part part(1, exchange.get()), hopping(1, hop.get());
    run(*own, part, hopping);
    check(*own, part, hopping);
  });
  NcclLibrary library = Library();
  library.cuda.MemcpyDtoDAsync = [](cuda::Pointer to, cuda::Pointer from, size_t bytes,
                                    cuda::Stream stream) {
    if (holds_copy.exchange(false)) staging.Hold(stream);
    return Cuda().MemcpyDtoDAsync(to, from, bytes, stream);
  };
  library.cuda.StreamWaitEvent = [](cuda::Stream stream, cuda::Event event,
                                    unsigned flags) {
    if (stream == of_program) ++waits;
    return Cuda().StreamWaitEvent(stream, event, flags);
  };
  Process own(id, {0}, 2, library);
  Part part(0, exchange.get()), hopping(0, hop.get());
  holds_copy = true;
  run(own, part, hopping);
  bool has_passed = false;
  CHECK_TRUE(Until([&] {
    has_passed = Cuda().StreamQuery(part.on.stream) == cuda::kSuccess;
    return has_passed || waits > kSlots;  // a hop has one, for its zeros
  }));
  CHECK_TRUE(!has_passed);
  staging.Open();
  check(own, part, hopping);
  CHECK_EQ(other.Wait(), EXIT_SUCCESS);
}

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
