// Carries out the moves of a plan between buffers of one address space.
//
// The folder reduce/ owns the plans of moves, cut into blocks, the sums of each type
// and processor, and how results are stored. local/ calls it for ranks of one process,
// arena/ for chunks of other processes. It knows no rank that waits. Nothing here
// blocks, but RunMoves() until other threads have moved the blocks that they claimed.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_REDUCE_EXECUTE_H_
#define JAXCOMM_FFI_BACKENDS_HOST_REDUCE_EXECUTE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/backends/host/reduce/host_plan.h"
#include "ffi/backends/host/reduce/reduce.h"
#include "ffi/backends/host/reduce/store.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

// The moves of one call, and the buffers that they are between: operands[rank][leaf].
// Buffers of other processes' ranks are not used.
struct CallMoves {
  const HostPlan* plan = nullptr;
  const std::vector<Leaf>* leaves = nullptr;
  ReduceOp reduce = ReduceOp::kSum;
  const void* const* const* operands = nullptr;
  void* const* const* results = nullptr;
};

// A block of them.
class BlockMover {
 public:
  BlockMover(const CallMoves& call, const Block& block)
      : call_(call),
        block_(block),
        move_(call.plan->moves[block.move]),
        leaf_((*call.leaves)[move_.leaf]),
        width_(static_cast<int64_t>(leaf_.element_bytes)) {}

  int64_t row_bytes() const { return block_.width() * width_; }
  int64_t bytes() const { return block_.rows() * row_bytes(); }
  // How results are written that this process does not read again.
  Store result_store() const { return Store(call_.plan->touched, leaf_.bytes()); }
  // Null members if the move combines nothing.
  ReduceKernels kernels() const {
    if (!move_.needs_kernels()) return {};
    return FindReduceKernels(leaf_.dtype, call_.reduce);
  }

  // Where a row begins in operands and in results, in bytes.
  int64_t From(int64_t row) const { return Offset(move_.from, row); }
  int64_t To(int64_t row) const { return Offset(move_.to, row); }
  const char* Operand(int rank) const {
    return static_cast<const char*>(call_.operands[rank][move_.leaf]);
  }
  char* Result(int rank) const {
    return static_cast<char*>(call_.results[rank][move_.leaf]);
  }

  // Gives every target what the move makes of a row of the sources: their reduction, a
  // copy of the only one, or the fill if there is none. Requires that the move is not
  // `running`. May move the pointers along.
  void MakeRow(const ReduceKernels& kernels, const Store& store, const void** sources,
               int num_sources, void** targets, int num_targets) const;
  // Moves all rows, from operands to results.
  void Run() const;

 private:
  int64_t Offset(const Strides& strides, int64_t row) const {
    return (move_.RowAt(strides, row) + block_.inner_begin) * width_;
  }

  const CallMoves& call_;
  const Block& block_;
  const Move& move_;
  const Leaf& leaf_;
  const int64_t width_;
};

// Blocks of moves offered to several threads, which claim them one at a time: work is
// claimed, never assigned, so a helper that is stuck behind other work costs nothing.
class SharedBlocks {
 public:
  // Those of the given moves.
  SharedBlocks(const CallMoves& call, const std::vector<int>& moves);

  // Moves blocks until none is left to claim. May be called by a helper that starts
  // long after the last block is done: the plan and the buffers are touched only for
  // blocks that it could claim, and the call that offered them waits for those.
  void Work();
  // At most one block per helper is still in motion once Work() has returned.
  void WaitForHelpers() const;

 private:
  const CallMoves call_;
  std::vector<std::pair<const Block*, int64_t>> runs_;  // first, count
  int64_t total_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
};

// Where a call in progress shows its blocks to threads that wait for it.
using Offer = std::atomic<SharedBlocks*>;

// Runs the given moves of a call to the end. Shares large moves with `waiting` threads
// that look at `offer`, and with `scheduler`'s threads. Waits only for blocks that
// another thread is already moving. Keep the offered blocks that it returns for as long
// as a thread may look at `offer`.
std::shared_ptr<SharedBlocks> RunMoves(const CallMoves& call,
                                       const std::vector<int>& moves,
                                       Scheduler* scheduler, Offer* offer, int waiting);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_REDUCE_EXECUTE_H_
