#include "ffi/backends/host/reduce/execute.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "ffi/os/cores.h"

namespace jaxcomm {
namespace {

// Below this a hand-over to another thread costs more than it saves.
constexpr int64_t kShareBytes = 256 << 10;

}  // namespace

void BlockMover::MakeRow(const ReduceKernels& kernels, const Store& store,
                         const void** sources, int num_sources, void** targets,
                         int num_targets) const {
  if (num_sources == 0 && !move_.identity) {
    for (int i = 0; i < num_targets; ++i) std::memset(targets[i], 0, row_bytes());
  } else if (num_sources == 0) {
    kernels.identity(targets[0], block_.width());
    store.Copy(targets + 1, num_targets - 1, targets[0], row_bytes());
  } else if (num_sources == 1) {
    store.Copy(targets, num_targets, sources[0], row_bytes());
  } else {
    store.Reduce(kernels, targets, num_targets, sources, num_sources, block_.width(),
                 width_);
  }
}

void BlockMover::Run() const {
  const int num_sources = static_cast<int>(move_.sources.size());
  const int num_targets = static_cast<int>(move_.targets.size());
  if (num_targets == 0) return;
  const ReduceKernels kernels = this->kernels();
  const Store store = result_store();
  PointerPerRank<const void> sources(num_sources);
  PointerPerRank<void> targets(num_targets);
  for (int64_t row = block_.row_begin; row < block_.row_end; ++row) {
    const int64_t from = From(row), to = To(row);
    for (int i = 0; i < num_sources; ++i) sources[i] = Operand(move_.sources[i]) + from;
    for (int i = 0; i < num_targets; ++i) targets[i] = Result(move_.targets[i]) + to;
    if (move_.running) {
      kernels.running(targets.data(), sources.data(), num_sources, block_.width());
    } else {
      MakeRow(kernels, store, sources.data(), num_sources, targets.data(), num_targets);
    }
  }
}

SharedBlocks::SharedBlocks(const CallMoves& call, const std::vector<int>& moves)
    : call_(call) {
  for (int index : moves) {
    const int first = call.plan->first_block[index];
    const int64_t count = call.plan->first_block[index + 1] - first;
    runs_.emplace_back(call.plan->blocks.data() + first, count);
    total_ += count;
  }
}

void SharedBlocks::Work() {
  int64_t claimed;
  while ((claimed = next_.fetch_add(1, std::memory_order_relaxed)) < total_) {
    int64_t index = claimed;
    size_t run = 0;
    while (index >= runs_[run].second) index -= runs_[run++].second;
    BlockMover(call_, runs_[run].first[index]).Run();
    done_.fetch_add(1, std::memory_order_acq_rel);
  }
}

void SharedBlocks::WaitForHelpers() const {
  for (int spins = 0; done_.load(std::memory_order_acquire) < total_; ++spins) {
    if (spins > 200) std::this_thread::yield();
  }
}

std::shared_ptr<SharedBlocks> RunMoves(const CallMoves& call,
                                       const std::vector<int>& moves,
                                       Scheduler* scheduler, Offer* offer,
                                       int waiting) {
  const HostPlan& plan = *call.plan;
  int64_t total = 0, bytes = 0;
  for (int index : moves) {
    const Move& move = plan.moves[index];
    total += plan.first_block[index + 1] - plan.first_block[index];
    bytes += move.rows() * move.inner *
             static_cast<int64_t>((*call.leaves)[move.leaf].element_bytes) *
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
        BlockMover(call, plan.blocks[b]).Run();
      }
    }
    return nullptr;
  }
  auto shared = std::make_shared<SharedBlocks>(call, moves);
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
