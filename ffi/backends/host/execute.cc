#include "ffi/backends/host/execute.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "ffi/backends/host/reduce.h"

namespace jaxcomm {
namespace {

// Below this a hand-over to another thread costs more than it saves.
constexpr int64_t kShareBytes = 256 << 10;

class Mover {
 public:
  Mover(const CallSite& site, const Plan& plan, const GroupBuffers& buffers)
      : site_(site), plan_(plan), buffers_(buffers) {}

  void Run(const Block& block) const {
    const Move& move = plan_.moves[block.move];
    const Leaf& leaf = site_.results()[move.leaf];
    const auto width = static_cast<int64_t>(leaf.element_bytes);
    const int64_t count = block.inner_end - block.inner_begin;
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      const int64_t i = row / move.middle, j = row % move.middle;
      const auto offset = [&](const Strides& strides) {
        return (strides.offset + i * strides.outer + j * strides.middle +
                block.inner_begin) *
               width;
      };
      MoveRow(move, leaf.dtype, offset(move.from), offset(move.to), count, width);
    }
  }

 private:
  const char* From(const Move& move, int source, int64_t offset) const {
    return static_cast<const char*>(
               buffers_.operands[move.sources[source]][move.leaf]) +
           offset;
  }
  char* To(const Move& move, int target, int64_t offset) const {
    return static_cast<char*>(buffers_.results[move.targets[target]][move.leaf]) +
           offset;
  }

  void MoveRow(const Move& move, DataType dtype, int64_t from, int64_t to,
               int64_t count, int64_t width) const {
    const int num_sources = static_cast<int>(move.sources.size());
    const int num_targets = static_cast<int>(move.targets.size());
    if (num_targets == 0) return;
    if (num_sources == 1 && !move.running) {
      const char* source = From(move, 0, from);
      for (int target = 0; target < num_targets; ++target) {
        std::memcpy(To(move, target, to), source, count * width);
      }
      return;
    }
    const ReduceOp op = site_.attributes().reduce;
    if (num_sources == 0 && !move.identity) {
      for (int target = 0; target < num_targets; ++target) {
        std::memset(To(move, target, to), 0, count * width);
      }
      return;
    }
    const ReduceKernels kernels = FindReduceKernels(dtype, op);
    constexpr int kInline = 64;
    const void* inline_sources[kInline];
    void* inline_targets[kInline];
    std::vector<const void*> heap_sources;
    std::vector<void*> heap_targets;
    const void** sources = inline_sources;
    void** targets = inline_targets;
    if (std::max(num_sources, num_targets) > kInline) {
      heap_sources.resize(num_sources);
      heap_targets.resize(num_targets);
      sources = heap_sources.data();
      targets = heap_targets.data();
    }
    for (int i = 0; i < num_sources; ++i) sources[i] = From(move, i, from);
    for (int i = 0; i < num_targets; ++i) targets[i] = To(move, i, to);
    if (move.running) {
      kernels.running(targets, sources, num_sources, count);
      return;
    }
    if (num_sources == 0) {
      kernels.identity(targets[0], count);
    } else {
      kernels.reduce(targets[0], sources, num_sources, count);
    }
    for (int i = 1; i < num_targets; ++i) {
      std::memcpy(targets[i], targets[0], count * width);
    }
  }

  const CallSite& site_;
  const Plan& plan_;
  const GroupBuffers& buffers_;
};

// Blocks offered to several threads. Outlives the call that offered them,
// because a helper may start long after the last block is done; by then it finds
// nothing left to claim and touches nothing else.
struct SharedBlocks {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  int64_t total = 0;
  const Mover* mover = nullptr;
  const std::pair<const Block*, int64_t>* runs = nullptr;  // first, count
  int64_t num_runs = 0;

  void Work() {
    int64_t claimed;
    while ((claimed = next.fetch_add(1, std::memory_order_relaxed)) < total) {
      int64_t index = claimed;
      int64_t run = 0;
      while (index >= runs[run].second) index -= runs[run++].second;
      mover->Run(runs[run].first[index]);
      done.fetch_add(1, std::memory_order_acq_rel);
    }
  }
};

}  // namespace

void RunMoves(const CallSite& site, const Plan& plan, const std::vector<int>& moves,
              const GroupBuffers& buffers, Scheduler* scheduler) {
  const Mover mover(site, plan, buffers);
  int64_t total = 0, bytes = 0;
  for (int index : moves) {
    const Move& move = plan.moves[index];
    total += plan.first_block[index + 1] - plan.first_block[index];
    bytes += move.outer * move.middle * move.inner *
             static_cast<int64_t>(site.results()[move.leaf].element_bytes) *
             static_cast<int64_t>(std::max<size_t>(
                 std::max(move.sources.size(), move.targets.size()), 1));
  }
  const int64_t threads = scheduler == nullptr ? 1 : scheduler->num_threads();
  if (total < 2 || bytes < kShareBytes || threads < 2) {
    for (int index : moves) {
      for (int b = plan.first_block[index]; b < plan.first_block[index + 1]; ++b) {
        mover.Run(plan.blocks[b]);
      }
    }
    return;
  }
  std::vector<std::pair<const Block*, int64_t>> runs;
  for (int index : moves) {
    const int first = plan.first_block[index];
    runs.emplace_back(plan.blocks.data() + first, plan.first_block[index + 1] - first);
  }
  auto shared = std::make_shared<SharedBlocks>();
  shared->total = total;
  shared->mover = &mover;
  shared->runs = runs.data();
  shared->num_runs = static_cast<int64_t>(runs.size());
  const int64_t helpers = std::min(threads, total) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    scheduler->Schedule([shared] { shared->Work(); });
  }
  shared->Work();
  // At most one block per helper is still in motion.
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < total; ++spins) {
    if (spins > 200) std::this_thread::yield();
  }
}

Status CheckReducible(const CallSite& site, const Plan& plan) {
  for (const Move& move : plan.moves) {
    const bool reduces = move.running || move.identity || move.sources.size() > 1;
    const DataType dtype = site.results()[move.leaf].dtype;
    if (reduces &&
        FindReduceKernels(dtype, site.attributes().reduce).reduce == nullptr) {
      return Status(ErrorCode::kUnimplemented,
                    StrCat(site.ToString(), ": the host backend cannot reduce ",
                           DataTypeName(dtype), "; cast it first"));
    }
  }
  return OkStatus();
}

}  // namespace jaxcomm
