// ragged_all_to_all whose offsets and sizes the GPUs read themselves: kernels check
// them, and store to memory of other ranks (kernels/ragged.h). No host waits.
//
// Between its kernels NCCL gathers the numbers of all ranks, and makes them wait for
// each other. So no kernel of ours waits, and what ends NCCL's operations ends these. A
// kernel that goes on after such an end finds numbers of nobody: it checks them like
// all others, and writes into arenas and the rank's own result, which is poisoned.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_DEVICE_SIZED_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_DEVICE_SIZED_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/engines/engine.h"
#include "ffi/backends/nccl/engines/peer_memory.h"
#include "ffi/backends/nccl/exchange.h"
#include "ffi/backends/nccl/kernels/device_kernels.h"
#include "ffi/backends/nccl/kernels/ragged.h"
#include "ffi/core/derived_cache.h"

namespace jaxcomm {

class DeviceSized final : public Engine {
 public:
  // `numbers`: where those of all ranks are gathered. `window_bytes`: a half of an
  // arena, a multiple of 16. Larger results take a barrier for each.
  static ErrorOr<std::unique_ptr<DeviceSized>> Create(
      NcclParts& parts, Exchange& numbers, uint64_t window_bytes,
      std::unique_ptr<PeerMemory> arenas);
  ~DeviceSized() override;

  // Shows the ranks of a group each other's arenas; every process calls it.
  Status Share() { return arenas_->Share(parts_); }
  // Whether it does the calls of a site: the same on all ranks of a group. Here and at
  // Enqueue(), one thread at a time for each rank.
  bool Takes(const CallSite& site, const RankFacts& rank);
  // Why some group does not take part; empty if all do that have more than one rank.
  const std::string& reason() const { return arenas_->reason(); }
  int64_t device_bytes() const { return arenas_->device_bytes(); }

  // Requires Takes(). It needs no recipe.
  Status Enqueue(const Call& call, const Recipe&, LocalRank& rank,
                 cuda::Stream stream) override {
    return Enqueue(call, rank, stream);
  }
  // Numbers that do not fit are found when the GPU comes to the call. On all ranks of
  // the group every bit of its result is set then, and the communicator fails: as soon
  // as the watch sees it, or the next call.
  Status Enqueue(const Call& call, LocalRank& rank, cuda::Stream stream);
  Status AsyncError(LocalRank& rank) override;
  // Has a stream wait for the last call of a rank, which reads the gathered numbers.
  Status KeepOrder(size_t place, cuda::Stream stream) const;

  // Unmaps other ranks' arenas, before they free them.
  void Leave();

 private:
  struct Member {
    DerivedCache<std::optional<RaggedArguments>> sites;
    std::shared_ptr<const DeviceKernels> kernels;
    cuda::Function give = nullptr, check = nullptr, move = nullptr;
    RaggedRefusal* refusal = nullptr;
    // Behind the last call, and the stream that has it: calls keep their order.
    cuda::Event last = nullptr;
    cuda::Stream stream = nullptr;
  };

  DeviceSized(NcclParts& parts, Exchange& numbers, uint64_t window_bytes,
              std::unique_ptr<PeerMemory> arenas)
      : parts_(parts),
        numbers_(numbers),
        window_bytes_(window_bytes),
        arenas_(std::move(arenas)),
        members_(parts.ranks.size()) {}

  Status Prepare(const LocalRank& rank);
  // What the calls of a site have in common; nothing if it does not take them.
  const std::optional<RaggedArguments>& ArgumentsOf(const CallSite& site,
                                                    const RankFacts& rank);
  std::optional<RaggedArguments> MakeArguments(const CallSite& site,
                                               const RankFacts& rank) const;
  Status Launch(const Call& call, LocalRank& rank, cuda::Stream stream);
  Status LaunchKernel(cuda::Function kernel, unsigned blocks,
                      const RaggedArguments& arguments, cuda::Stream stream) const;
  // Has the stream wait until all ranks have come so far.
  Status Barrier(const RankFacts& rank, cuda::Stream stream) const;
  // Fails the communicator if a call was refused, and says what did not fit in the
  // first. Returns whether one was.
  bool FailIfRefused(const RankFacts& rank);

  NcclParts& parts_;
  Exchange& numbers_;
  const uint64_t window_bytes_;
  const std::unique_ptr<PeerMemory> arenas_;
  std::vector<Member> members_;  // by place
  bool has_left_ = false;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_DEVICE_SIZED_H_
