// Processes whose copies go through memory that they have mapped, and what they send.
#ifndef JAXCOMM_TESTS_FFI_MAPPED_PROCESSES_H_
#define JAXCOMM_TESTS_FFI_MAPPED_PROCESSES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {

inline constexpr int64_t kRow = 128 << 10;  // floats
inline constexpr int kSlots = 4;

// Staged in a rank's own memory, since NCCL would send packed rows. A rank sends
// `rows` to each.
inline std::unique_ptr<CallSite> Exchange(int size, int64_t rows) {
  const Leaf leaf = FloatLeaf(size * rows * kRow);
  return MakeSite("all_to_all", {1, rows, 1}, {leaf}, {leaf, leaf});
}

// Staged in the memory of the one that a rank sends to.
inline std::unique_ptr<CallSite> Hop(std::vector<int64_t> sources) {
  return FloatSite("permute", std::move(sources), 8 * kRow);
}

// Whether a rank has all that another sent it by an exchange.
inline bool HasRows(const Part& part, int size, const Part& source) {
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

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_MAPPED_PROCESSES_H_
