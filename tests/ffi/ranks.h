// Ranks as threads: what the tests of a communicator share.
#ifndef JAXCOMM_TESTS_FFI_RANKS_H_
#define JAXCOMM_TESTS_FFI_RANKS_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/planners/collectives.h"
#include "tests/ffi/waiting.h"

namespace jaxcomm::testing {

// Calls `body` for each rank, all at once, each in a thread.
template <typename Body>
void ForRanks(int size, const Body& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// The error that a rank's future completed with, empty for success.
class Outcome {
 public:
  void Watch(xla::ffi::Future future) {
    future.OnReady([this](const std::optional<xla::ffi::Error>& error) {
      std::lock_guard<std::mutex> lock(mutex_);
      text_ = error.has_value() ? error->message() : "";
      changed_.notify_all();
    });
  }
  bool done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return text_.has_value();
  }
  std::string Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return text_.has_value(); });
    return *text_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::string> text_;
};

inline Leaf FloatLeaf(int64_t elements) {
  return Leaf{DataType::F32, {elements}, elements, sizeof(float)};
}

inline std::unique_ptr<CallSite> MakeSite(const std::string& collective,
                                          std::vector<int64_t> params,
                                          std::vector<Leaf> operands,
                                          std::vector<Leaf> results,
                                          ReduceOp op = ReduceOp::kSum) {
  auto site = std::make_unique<CallSite>(
      CallSite::Attributes{collective, "('x',)", 1, 0, op, std::move(params)},
      *FindCollective(collective));
  site->SetShapes(std::move(operands), std::move(results));
  return site;
}

// Of one array of floats, and as many results if it is not said otherwise.
inline std::unique_ptr<CallSite> FloatSite(const std::string& collective,
                                           std::vector<int64_t> params,
                                           int64_t elements, int64_t results = -1) {
  return MakeSite(collective, std::move(params), {FloatLeaf(elements)},
                  {FloatLeaf(results < 0 ? elements : results)});
}

inline CommunicatorSpec Spec(std::vector<std::vector<int64_t>> groups,
                             double timeout_seconds = kHangSeconds) {
  CommunicatorSpec spec;
  spec.key = 1;
  spec.axes = "('x',)";
  spec.lane = "default";
  spec.backend = "host";
  spec.platform = "cpu";
  spec.timeout_seconds = timeout_seconds;
  spec.groups = std::move(groups);
  return spec;
}

// An operation of which each rank needs something of the others. Zeros are right as its
// operands, which may all lie in one place.
struct Use {
  const char* collective;
  std::vector<int64_t> params;
  int64_t operand, result;  // elements of floats; of ragged_all_to_all, rows

  std::unique_ptr<CallSite> MakeSite(int64_t times = 1) const {
    if (collective != std::string("ragged_all_to_all")) {
      return FloatSite(collective, params, operand * times, result * times);
    }
    const Leaf rows = FloatLeaf(operand * times);
    const Leaf numbers{DataType::S32, {2}, 2, sizeof(int32_t)};
    return testing::MakeSite(collective, params,
                             {rows, rows, numbers, numbers, numbers, numbers}, {rows});
  }
};

// Of two ranks, `root` is the one of which the other needs something.
inline std::vector<Use> UsesOfTwo(int64_t root) {
  return {{"all_reduce", {}, 4, 4},
          {"all_gather", {1}, 4, 8},
          {"all_to_all", {1, 1, 1}, 4, 4},
          {"barrier", {}, 4, 4},
          {"broadcast", {root}, 4, 4},
          {"gather", {1 - root, 1}, 4, 8},
          {"permute", {root == 0 ? -1 : 1, root == 0 ? 0 : -1}, 4, 4},
          {"ragged_all_to_all", {}, 4, 4},
          {"reduce", {1 - root}, 4, 4},
          {"reduce_scatter", {1}, 4, 2},
          {"scan", {0, root}, 4, 4},
          {"scatter", {root, 1}, 4, 2}};
}

// One operand and one result of one rank.
struct RankBuffers {
  RankBuffers(int64_t operand_elements, int64_t result_elements, float value)
      : operand(operand_elements, value), result(result_elements, -1.0f) {}

  void Arrive(Communicator& communicator, CallSite* site, int64_t run_id,
              int64_t device_id, Outcome* outcome, uint64_t tag = 1) {
    const std::vector<const void*> operands(site->operands().size(), operand.data());
    void* results[] = {result.data()};
    outcome->Watch(communicator.Execute(
        Call{site, run_id, tag, tag, device_id, operands.data(), results, nullptr}));
  }

  std::vector<float> operand;
  std::vector<float> result;
};

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_RANKS_H_
