// Copies between processes, by memory that they have mapped: in which order slots are
// staged in and read, and what waits for it.
#include <map>

#include "tests/ffi/mapped_processes.h"

namespace jaxcomm::testing {
namespace {

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

Gate staged;
std::atomic<bool> holds_staging{false};

// What a rank stages is copied by a kernel, which the next one would leave no room. So
// the program's stream goes on once that is done, and waits for nobody else. What is
// staged behind another start waits for the others, and the program does not.
TEST_ALONE(behind_a_start_a_program_goes_on_once_its_operand_is_staged, EXIT_SUCCESS) {
  const nccl::UniqueId id = NewId();
  Pipe comes;
  const int64_t count = 24 * kRow;  // two slots
  const auto gather = FloatSite("all_gather", {1}, count, 2 * count);
  Child other([&] {
    auto* const own = new Process(id, {1}, 2, Library());  // ends with this process
    Part part(1, gather.get()), more(1, gather.get());
    comes.Wait();
    for (Part* each : {&part, &more}) CHECK_OK(each->Start(*own->communicator));
    for (Part* each : {&part, &more}) CHECK_OK(each->Done(*own->communicator));
    const Part first(0, gather.get());
    for (Part* each : {&part, &more}) {
      each->on.Synchronize();
      CHECK_TRUE(Holds(*each, 0, first, 0, count));
      CHECK_TRUE(Holds(*each, count, *each, 0, count));
    }
  });
  NcclLibrary library = Library();
  library.cuda.MemcpyDtoDAsync = [](cuda::Pointer to, cuda::Pointer from, size_t bytes,
                                    cuda::Stream stream) {
    if (holds_staging.exchange(false)) staged.Hold(stream);
    return Cuda().MemcpyDtoDAsync(to, from, bytes, stream);
  };
  Process own(id, {0}, 2, library);
  Part part(0, gather.get()), more(0, gather.get());
  holds_staging = true;
  CHECK_OK(part.Start(*own.communicator));
  CHECK_EQ(NcclStatsOf(*own.communicator).copied_calls, 1);
  const Milestone goes_on(part.on.stream);
  LetOthersRun();
  CHECK_TRUE(!goes_on.passed());
  staged.Open();
  part.on.Synchronize();
  CHECK_TRUE(goes_on.passed());
  CHECK_OK(more.Start(*own.communicator));
  more.on.Synchronize();
  comes.Tell();
  for (Part* each : {&part, &more}) CHECK_OK(each->Done(*own.communicator));
  const Part second(1, gather.get());
  for (Part* each : {&part, &more}) {
    each->on.Synchronize();
    CHECK_TRUE(Holds(*each, 0, *each, 0, count));
    CHECK_TRUE(Holds(*each, count, second, 0, count));
  }
  CHECK_EQ(other.Wait(), EXIT_SUCCESS);
}

}  // namespace
}  // namespace jaxcomm::testing
