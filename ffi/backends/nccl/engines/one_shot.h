// Small collectives between the devices of one host, by one launch of a kernel
// (kernels/kernels.h): every rank writes what others need into their memory, and takes
// what it finds in its own.
//
// NCCL's call costs the host more than the GPU needs for them, and in a chain that is
// what counts.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ONE_SHOT_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ONE_SHOT_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/engines/peer_memory.h"
#include "ffi/backends/nccl/kernels/device_kernels.h"
#include "ffi/backends/nccl/kernels/kernels.h"
#include "ffi/backends/nccl/library/library.h"
#include "ffi/backends/nccl/library/rank_facts.h"
#include "ffi/backends/nccl/plans/one_shot_plan.h"
#include "ffi/backends/nccl/queue/in_flight.h"
#include "ffi/base/status.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

class OneShot {
 public:
  // `inboxes`: of this process's ranks, with nothing taken yet. To be used once their
  // streams have come to their ends. `flag`: of the work before the first.
  static ErrorOr<std::unique_ptr<OneShot>> Create(std::unique_ptr<PeerMemory> inboxes,
                                                  uint32_t flag = 0);
  ~OneShot();

  // Waits for what is given to streams, and leaves the others' inboxes.
  void Leave();

  // A group takes part if all of its ranks can: then all do, or none. Ranks of one
  // process know it at once. For the others every process calls this.
  Status Share(NcclParts& parts) { return inboxes_->Share(parts); }

  // Whether all ranks of a member's group do, and how much work they have left: flags
  // are not used again.
  bool takes_part(size_t member) const { return inboxes_->is_shared(member); }
  uint32_t works_left(size_t member) const { return ~ranks_[member].flag.load(); }

  // Gives `stream` the work of a call. Returns what tells how far it is. Requires that
  // one thread at a time calls it for each member.
  ErrorOr<InFlight::Told> Launch(const OneShotPlan& plan, const Call& call,
                                 size_t member, cuda::Stream stream);

  // Lets kernels leave that wait for other ranks, without a result, from now on. Those
  // behind them send all the same, over what a late rank may still read. So it requires
  // that nobody takes a result of this group for one any more.
  void Stop();

  int64_t device_bytes() const { return inboxes_->device_bytes(); }
  // Why some group does not take part; empty if all do that have more than one rank.
  const std::string& reason() const { return inboxes_->reason(); }

 private:
  // The part of the host's memory that devices reach.
  struct Shared;
  // The same on all ranks.
  struct Grid {
    unsigned blocks, threads;
  };

  struct RankState {
    RankFacts facts;
    size_t index = 0;
    std::shared_ptr<const DeviceKernels> kernels;  // null: the rank cannot take part
    cuda::Function lines = nullptr, staged = nullptr, exchange = nullptr;
    OneShotProgress* progress = nullptr;
    // The stream that the last work was given to, and its flag: work keeps its order.
    cuda::Stream stream = nullptr;
    uint32_t launched = 0;
    // Behind the last work. An event costs as much as a launch. So it is recorded when
    // another stream is to wait for it; once there was one, with each work, since
    // `stream` may be given more meanwhile that nobody need wait for.
    cuda::Event last = nullptr;
    bool is_recorded = false, changes_streams = false;
    OneShotArguments arguments;
    std::atomic<uint32_t> flag{0};  // of the last work
  };

  explicit OneShot(std::unique_ptr<PeerMemory> inboxes)
      : library_(inboxes->library()), inboxes_(std::move(inboxes)) {}

  Status LoadKernels(RankState& state);
  Status LaunchOne(const OneShotWork& work, const Call& call, RankState& state,
                   cuda::Stream stream);
  Status LaunchExchange(const OneShotPlan& plan, const Call& call, RankState& state,
                        cuda::Stream stream);
  // Gives a kernel to `stream`, which uses so many flags from the next one on.
  Status Give(RankState& state, cuda::Function kernel, void* arguments, Grid grid,
              uint32_t flags, cuda::Stream stream);
  // Whether the last work may be yet to run.
  bool MayRun(const RankState& state) const;
  // Has `stream` wait for it.
  Status WaitForLast(RankState& state, cuda::Stream stream);
  Status Prepare(RankState& state);
  // Whether all work has run, in some seconds.
  bool IsIdleSoon();

  const NcclLibrary& library_;
  Shared* shared_ = nullptr;
  std::atomic<bool> is_stopped_{false};
  std::optional<bool> is_idle_;  // known once it has left
  const std::unique_ptr<PeerMemory> inboxes_;
  std::deque<RankState> ranks_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ONE_SHOT_H_
