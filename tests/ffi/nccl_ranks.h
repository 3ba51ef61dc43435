// Communicators of the NCCL backend over the stand-in, and their ranks.
#ifndef JAXCOMM_TESTS_FFI_NCCL_RANKS_H_
#define JAXCOMM_TESTS_FFI_NCCL_RANKS_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"
#include "ffi/base/keep_forever.h"
#include "tests/ffi/check.h"
#include "tests/ffi/fake_nccl.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {

// What a device that was stopped fails with: a misaligned address.
inline constexpr auto kStopped = static_cast<cuda::Result>(716);

// 32 MiB, the least that a rank sends by copies.
inline constexpr int64_t kMany = 8 << 20;

// Of ranks of one process: rank r is device 100 + r. Unless a test says otherwise they
// wait for each other as long as they may.
struct Options {
  int size = 2;
  double timeout = kHangSeconds;
  OnFailure on_failure = OnFailure::kPoison;
  bool copies = false, one_shot = false;
  std::vector<std::vector<int64_t>> groups = {};  // none: one of all
  NcclLibrary library = Library();
  double copy_patience = kHangSeconds / 2;
  NcclSettings settings = {};
  bool check = false;
  bool device_sizes = false;
  uint64_t window_bytes = 4096;
};

inline std::shared_ptr<NcclWorld> MakeWorld(int size = 2,
                                            const NcclLibrary& library = Library(),
                                            const NcclSettings& settings = {}) {
  const nccl::UniqueId id = NewId();
  std::vector<NcclDevice> devices;
  for (int rank = 0; rank < size; ++rank) devices.push_back({100 + rank, rank, rank});
  return Must(NcclWorld::Create(library, size, devices,
                                {id.internal, sizeof(id.internal)}, settings,
                                {kHangSeconds}, {}));
}

// `library` must outlive it.
inline std::shared_ptr<Communicator> Make(const Options& options = {},
                                          std::shared_ptr<NcclWorld> world = nullptr) {
  // What stops the devices refers to it as long as the process lives.
  auto kept = std::make_unique<NcclLibrary>(options.library);
  const NcclLibrary& library = *kept;
  KeepForever(std::move(kept));
  if (options.one_shot) setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
  if (world == nullptr) world = MakeWorld(options.size, library, options.settings);
  auto groups = options.groups;
  if (groups.empty()) {
    groups.emplace_back(options.size);
    std::iota(groups[0].begin(), groups[0].end(), 100);
  }
  NcclSpec how{world,
               options.settings,
               {kHangSeconds},
               {options.copies, options.one_shot, options.copy_patience,
                options.device_sizes, options.window_bytes, EnginePolicy{}.arena_bytes,
                /*least_copied_to_many=*/0},
               options.on_failure};
  how.check = options.check;
  CommunicatorSpec spec = Spec(groups, options.timeout);
  spec.platform = "gpu";
  return Must(MakeNcclCommunicator(std::move(spec), how));
}

// One whose large collectives are done by copy engines.
inline std::shared_ptr<Communicator> MakeCopying(double timeout = kHangSeconds,
                                                 int size = 2,
                                                 const NcclLibrary& library = Library(),
                                                 double patience = kHangSeconds / 2) {
  Options options;
  options.size = size;
  options.timeout = timeout;
  options.copies = true;
  options.library = library;
  options.copy_patience = patience;
  return Make(options);
}

// One whose small sums are done by this package's own kernels.
inline std::shared_ptr<Communicator> MakeOneShot(
    int size = 2, double timeout = kHangSeconds, const NcclLibrary& library = Library(),
    OnFailure on_failure = OnFailure::kPoison) {
  Options options;
  options.size = size;
  options.timeout = timeout;
  options.one_shot = true;
  options.library = library;
  options.on_failure = on_failure;
  auto made = Make(options);
  TheFake().clear_trace();
  return made;
}

// Requires that the communicator is one of NCCL's.
inline NcclCommunicator& NcclOf(Communicator& communicator) {
  return dynamic_cast<NcclCommunicator&>(communicator);
}
inline NcclStats NcclStatsOf(Communicator& communicator) {
  return NcclOf(communicator).nccl_stats();
}

inline bool IsIdle(Communicator& communicator) {
  return communicator.stats().in_flight == 0;
}

inline int CountOf(Communicator& communicator, FlightRecorder::State state) {
  int count = 0;
  for (const auto& entry : communicator.recorder().Snapshot()) {
    count += entry.state == state;
  }
  return count;
}

inline std::unique_ptr<CallSite> SumSite(int64_t elements) {
  return FloatSite("all_reduce", {}, elements);
}

// An exchange of two ranks, large enough to be copied.
inline std::unique_ptr<CallSite> Swap() { return FloatSite("permute", {1, 0}, kMany); }

// One rank of a collective of floats: its buffers, and XLA's stream.
struct Part {
  Part(int device, CallSite* site)
      : on(device),
        device(device),
        site(site),
        operand(static_cast<size_t>(site->operands()[0].elements)),
        result(static_cast<size_t>(site->results()[0].elements), -1) {
    std::iota(operand.begin(), operand.end(), static_cast<float>(device * 7 % 5));
    operands.assign(site->operands().size(), operand.data());
    results.push_back(result.data());
    for (size_t i = 1; i < site->results().size(); ++i) {
      const auto elements = static_cast<size_t>(site->results()[i].elements);
      results.push_back(rooms.emplace_back(elements, -2.0f).data());
    }
  }
  // The stream may still be at the buffers, also of a call that has failed.
  ~Part() { on.Synchronize(); }

  Call CallOf(int64_t run = 1) const {
    return Call{site, run, 1, 1, device, operands.data(), results.data(), nullptr};
  }
  Status Enqueue(Communicator& communicator, int64_t run = 1) {
    return communicator.Enqueue(CallOf(run), on.stream);
  }
  Status Start(Communicator& communicator, int64_t run = 1) {
    return communicator.EnqueueStart(CallOf(run), on.stream);
  }
  Status Done(Communicator& communicator, int64_t run = 1) {
    return communicator.EnqueueDone(CallOf(run), on.stream);
  }

  OnDevice on;
  int device;
  CallSite* site;
  std::vector<float> operand, result;
  std::vector<const void*> operands;
  std::vector<std::vector<float>> rooms;  // results without meaning
  std::vector<void*> results;
};

// One psum of a number, as one device.
struct Psum : Part {
  explicit Psum(int device) : Part(device, TheSite()) { operand[0] = 1; }
  static CallSite* TheSite() {
    static CallSite* const site = FloatSite("all_reduce", {}, 1).release();
    return site;
  }
};

using Parts = std::vector<std::unique_ptr<Part>>;

// Runs `body` for each rank in a thread, and waits for its stream.
template <typename Body>
Parts ForParts(int size, CallSite* site, const Body& body) {
  Parts parts(static_cast<size_t>(size));
  ForRanks(size, [&](int rank) {
    // Its context is of this thread.
    parts[rank] = std::make_unique<Part>(rank, site);
    body(*parts[rank]);
    parts[rank]->on.Synchronize();
  });
  return parts;
}

inline Parts EnqueueAll(Communicator& communicator, int size, CallSite* site) {
  return ForParts(size, site,
                  [&](Part& part) { CHECK_OK(part.Enqueue(communicator)); });
}

// Two ranks that this thread drives.
struct Two {
  explicit Two(CallSite* site) : first(0, site), second(1, site) {}
  void Start(Communicator& communicator, int64_t run = 1) {
    for (Part* part : {&first, &second}) CHECK_OK(part->Start(communicator, run));
  }
  void Done(Communicator& communicator, int64_t run = 1) {
    for (Part* part : {&first, &second}) CHECK_OK(part->Done(communicator, run));
  }
  void Enqueue(Communicator& communicator, int64_t run = 1) {
    for (Part* part : {&first, &second}) CHECK_OK(part->Enqueue(communicator, run));
  }
  void Synchronize() {
    for (Part* part : {&first, &second}) part->on.Synchronize();
  }
  Part first, second;
};

// Whether a part of a result is a part of a rank's operand.
inline bool Holds(const Part& part, int64_t at, const Part& source, int64_t from,
                  int64_t count) {
  return std::equal(part.result.begin() + at, part.result.begin() + at + count,
                    source.operand.begin() + from);
}

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_NCCL_RANKS_H_
