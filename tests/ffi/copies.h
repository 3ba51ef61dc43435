// Shared by the tests of copy engines and of small sums: a communicator that does
// without NCCL, and its ranks.
#ifndef JAXCOMM_TESTS_FFI_COPIES_H_
#define JAXCOMM_TESTS_FFI_COPIES_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"
#include "tests/ffi/check.h"
#include "tests/ffi/fake_library.h"
#include "tests/ffi/fake_nccl.h"
#include "tests/ffi/nccl_stats.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {

// 32 MiB, the least that a rank sends by copies.
inline constexpr int64_t kMany = 8 << 20;

// A rank that is merely slow is never late: ranks wait for it as long as they may.
inline std::shared_ptr<Communicator> Make(int size, double timeout_seconds = 30,
                                          const NcclLibrary& library = Library(),
                                          std::vector<std::vector<int64_t>> groups = {},
                                          bool one_shot = false,
                                          OnFailure on_failure = OnFailure::kPoison,
                                          double copy_patience_seconds = 60) {
  const nccl::UniqueId id = NewId();
  std::vector<NcclDevice> devices;
  std::vector<int64_t> all;
  for (int rank = 0; rank < size; ++rank) {
    devices.push_back({100 + rank, rank, rank});
    all.push_back(100 + rank);
  }
  if (groups.empty()) groups = {all};
  auto world = Must(NcclWorld::Create(
      library, size, devices, {id.internal, sizeof(id.internal)}, {}, {30}, {}));
  return Must(MakeNcclCommunicator(
      Spec(groups, timeout_seconds),
      {world,
       {},
       {30},
       {/*copy_engines=*/!one_shot, one_shot, copy_patience_seconds},
       on_failure}));
}

// One rank of a collective: its buffers, and XLA's stream.
struct Part {
  Part(int device, CallSite* site)
      : on(device),
        device(device),
        site(site),
        operand(static_cast<size_t>(site->operands()[0].elements)),
        result(static_cast<size_t>(site->results()[0].elements), -1) {
    std::iota(operand.begin(), operand.end(), static_cast<float>(device * 7 % 5));
    operands[0] = operand.data();
    results[0] = result.data();
  }

  Call CallOf(int64_t run = 1) {
    return Call{site, run, 1, 1, device, operands, results, nullptr};
  }

  OnDevice on;
  int device;
  CallSite* site;
  std::vector<float> operand, result;
  const void* operands[1];
  void* results[1];
};

inline std::unique_ptr<CallSite> Site(const std::string& collective,
                                      std::vector<int64_t> params,
                                      int64_t results = kMany,
                                      int64_t operands = kMany) {
  return MakeSite(collective, std::move(params), {FloatLeaf(operands)},
                  {FloatLeaf(results)});
}

// Runs `body` for each rank in a thread, and waits for its stream.
inline void ForAll(int size, CallSite* site, const std::function<void(Part&)>& body,
                   std::vector<std::unique_ptr<Part>>* parts = nullptr) {
  std::vector<std::unique_ptr<Part>> own(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      // Its context is of this thread.
      own[rank] = std::make_unique<Part>(rank, site);
      body(*own[rank]);
      own[rank]->on.Synchronize();
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (parts != nullptr) *parts = std::move(own);
}

// Whether a part of a result is a part of a rank's operand.
inline bool Holds(const Part& part, int64_t at, const Part& source, int64_t from,
                  int64_t count) {
  return std::equal(part.result.begin() + at, part.result.begin() + at + count,
                    source.operand.begin() + from);
}

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_COPIES_H_
