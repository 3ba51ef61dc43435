// The NCCL calls by which one rank carries out a plan.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PLANS_STEPS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PLANS_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "ffi/backends/nccl/library/library.h"
#include "ffi/base/status.h"
#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/core/plan.h"

namespace jaxcomm {

struct Step {
  enum class Kind {
    kCopy,  // within the rank
    kZero,
    kSend,
    kRecv,
    kAllReduce,
    kReduce,
    kReduceScatter,
    kAllGather,
    kAllToAll,
    kBroadcast,
    kGather,
    kScatter,
  };

  Kind kind;
  int leaf = 0;
  int64_t from = 0;  // bytes into the operand
  int64_t to = 0;    // bytes into the result
  size_t count = 0;  // of `type`, as the NCCL function of the kind counts
  // Copies, and what copies replace, may move several rows of `count` bytes: a pitch is
  // the bytes from one to the next.
  int64_t rows = 1, from_pitch = 0, to_pitch = 0;
  // The result in place of the operand or of the leaf's; see Plan::Division. -1: none.
  int from_room = -1, to_room = -1;
  nccl::Type type = nccl::Type::kInt8;
  nccl::RedOp op = nccl::RedOp::kSum;
  int peer = 0;  // or root

  // Whether rows are apart, where they come from or where they go.
  bool has_gaps() const {
    const auto row = static_cast<int64_t>(count);
    return rows != 1 && (from_pitch != row || to_pitch != row);
  }
  int64_t bytes() const { return static_cast<int64_t>(count) * rows; }
};

struct Steps {
  std::vector<Step> local;    // copies and zeros
  std::vector<Step> grouped;  // NCCL's; more than one go as a group
  std::vector<Step> behind;   // copies
};

// Which of NCCL's functions for a whole collective may be used where nothing is
// reduced: none, those of 2.18 or those of 2.28.
enum class Natives { kNone, kOf218, kOf228 };

// Makes the steps of a rank for what copies rows: sends and receives of moves alone, of
// which each says where it comes from and where it goes.
ErrorOr<Steps> MakeStridedSteps(const CallSite& site, const Plan& plan, int rank);

// Has NCCL do them, which sends contiguous bytes: rows are packed in their leaf's room
// before they are sent, or where they arrived, on the side where they are not
// contiguous. They are sent one by one where they are so on neither, or have no room.
Steps ForNccl(Steps strided, const std::vector<Plan::Division>& leaves);

// Makes the steps of a rank: one for a leaf where NCCL has a function for what the plan
// does with it, else the moves in which the rank takes part. All ranks make theirs in
// the same order.
// Fails for reductions that NCCL has not: the lowering is to have made something else
// of them.
ErrorOr<Steps> MakeSteps(const CallSite& site, const Plan& plan, int rank,
                         Natives natives);

// Gives `stream` the copy of a step, to and from where its rows begin.
Status CopyRows(const NcclLibrary& library, const Step& step, cuda::Pointer to,
                cuda::Pointer from, cuda::Stream stream);

// Gives `stream` a copy within the rank, or zeros.
Status RunLocalStep(const NcclLibrary& library, const Step& step,
                    const void* const* operands, void* const* results,
                    cuda::Stream stream);

// Given what NCCL's function of this name returned, waits until the call is over if it
// is in progress, and returns how it ended.
using FinishCall = std::function<Status(nccl::Result, const char*)>;

// Gives `stream` the copies within the rank, NCCL's calls, more than one as a group,
// and the copies behind them.
Status RunSteps(const NcclLibrary& library, const Steps& steps, const Call& call,
                nccl::Comm comm, cuda::Stream stream, const FinishCall& finish);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PLANS_STEPS_H_
