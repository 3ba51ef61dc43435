#include "ffi/backends/host/execute.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "ffi/backends/host/reduce.h"
#include "ffi/backends/host/store.h"
#include "ffi/os/cores.h"

namespace jaxcomm {
namespace {

// Below this a hand-over to another thread costs more than it saves.
constexpr int64_t kShareBytes = 256 << 10;

class Mover {
 public:
  Mover(const CallSite& site, const HostPlan& plan, const GroupBuffers& buffers)
      : site_(site), plan_(plan), buffers_(buffers) {}

  void Run(const Block& block) const {
    const Move& move = plan_.moves[block.move];
    const Leaf& leaf = site_.results()[move.leaf];
    const auto width = static_cast<int64_t>(leaf.element_bytes);
    const int64_t count = block.inner_end - block.inner_begin;
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      const auto offset = [&](const Strides& strides) {
        return (move.RowAt(strides, row) + block.inner_begin) * width;
      };
      MoveRow(move, leaf, offset(move.from), offset(move.to), count);
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

  void MoveRow(const Move& move, const Leaf& leaf, int64_t from, int64_t to,
               int64_t count) const {
    const auto width = static_cast<int64_t>(leaf.element_bytes);
    const int num_sources = static_cast<int>(move.sources.size());
    const int num_targets = static_cast<int>(move.targets.size());
    if (num_targets == 0) return;
    if (num_sources == 0 && !move.identity) {
      for (int target = 0; target < num_targets; ++target) {
        std::memset(To(move, target, to), 0, count * width);
      }
      return;
    }
    PointerPerRank<const void> sources(num_sources);
    PointerPerRank<void> targets(num_targets);
    for (int i = 0; i < num_sources; ++i) sources[i] = From(move, i, from);
    for (int i = 0; i < num_targets; ++i) targets[i] = To(move, i, to);
    const Store store(plan_.touched, leaf.bytes());
    if (num_sources == 1 && !move.running) {
      store.Copy(targets.data(), num_targets, sources[0], count * width);
      return;
    }
    const ReduceKernels kernels =
        FindReduceKernels(leaf.dtype, site_.attributes().reduce);
    if (move.running) {
      kernels.running(targets.data(), sources.data(), num_sources, count);
    } else if (num_sources == 0) {
      kernels.identity(targets[0], count);
      store.Copy(targets.data() + 1, num_targets - 1, targets[0], count * width);
    } else {
      store.Reduce(kernels, targets.data(), num_targets, sources.data(), num_sources,
                   count, width);
    }
  }

  const CallSite& site_;
  const HostPlan& plan_;
  const GroupBuffers& buffers_;
};

// Touches the plan and the buffers only for blocks it could claim, and the call that
// offered them waits for those.
class ClaimedBlocks final : public SharedBlocks {
 public:
  ClaimedBlocks(const Mover& mover, const HostPlan& plan, const std::vector<int>& moves)
      : mover_(mover) {
    for (int index : moves) {
      const int first = plan.first_block[index];
      const int64_t count = plan.first_block[index + 1] - first;
      runs_.emplace_back(plan.blocks.data() + first, count);
      total_ += count;
    }
  }

  void Work() override {
    int64_t claimed;
    while ((claimed = next_.fetch_add(1, std::memory_order_relaxed)) < total_) {
      int64_t index = claimed;
      size_t run = 0;
      while (index >= runs_[run].second) index -= runs_[run++].second;
      mover_.Run(runs_[run].first[index]);
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  // At most one block per helper is still in motion once Work() has returned.
  void WaitForHelpers() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < total_; ++spins) {
      if (spins > 200) std::this_thread::yield();
    }
  }

 private:
  const Mover& mover_;
  std::vector<std::pair<const Block*, int64_t>> runs_;  // first, count
  int64_t total_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
};

}  // namespace

std::shared_ptr<SharedBlocks> RunMoves(const CallSite& site, const HostPlan& plan,
                                       const std::vector<int>& moves,
                                       const GroupBuffers& buffers,
                                       Scheduler* scheduler, Offer* offer,
                                       int waiting) {
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
  // XLA's pool has a thread for each virtual device; more of them than cores would
  // only be in each other's way.
  const int64_t pool =
      scheduler == nullptr ? 1 : std::min<int64_t>(scheduler->num_threads(), Cores());
  const int64_t threads = std::max<int64_t>(pool, 1 + waiting);
  if (total < 2 || bytes < kShareBytes || threads < 2) {
    for (int index : moves) {
      for (int b = plan.first_block[index]; b < plan.first_block[index + 1]; ++b) {
        mover.Run(plan.blocks[b]);
      }
    }
    return nullptr;
  }
  auto shared = std::make_shared<ClaimedBlocks>(mover, plan, moves);
  offer->store(shared.get(), std::memory_order_release);
  const int64_t helpers = std::min(pool, total) - 1 - waiting;
  for (int64_t i = 0; i < helpers; ++i) {
    scheduler->Schedule([shared] { shared->Work(); });
  }
  shared->Work();
  shared->WaitForHelpers();
  return shared;
}

}  // namespace jaxcomm
