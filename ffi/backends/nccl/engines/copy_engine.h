// Large collectives that only move bytes, by the GPUs' copy engines (peer_copies.h).
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_COPY_ENGINE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_COPY_ENGINE_H_

#include <algorithm>
#include <memory>
#include <utility>

#include "ffi/backends/nccl/engines/engine.h"
#include "ffi/backends/nccl/engines/nccl_engine.h"
#include "ffi/backends/nccl/engines/peer_copies.h"

namespace jaxcomm {

class CopyEngine final : public Engine {
 public:
  // `nccl` does what comes too late for copies, by more than the patience.
  CopyEngine(NcclParts& parts, std::unique_ptr<PeerCopies> copies,
             double patience_seconds, NcclEngine& nccl)
      : parts_(parts),
        copies_(std::move(copies)),
        patience_seconds_(std::min(patience_seconds, parts.spec.timeout_seconds)),
        nccl_(nccl) {}

  bool takes_part(size_t place) const { return copies_->takes_part(place); }

  Status Enqueue(const Call& call, const Recipe& recipe, LocalRank& rank,
                 cuda::Stream stream) override;
  Status Start(const Call& call, const Recipe& recipe, LocalRank& rank,
               cuda::Stream stream) override;
  ErrorOr<bool> Done(const Call& call, LocalRank& rank, cuda::Stream stream) override;
  void Refuse(const Status& reason) override { copies_->Fail(reason); }

  // Drops what was started into the results of a call, since its program failed before
  // its end. To be called when another engine starts the call.
  Status Forget(const Call& call, LocalRank& rank, cuda::Stream stream);
  // Likewise, of what earlier runs than that of the call started.
  Status ForgetEarlierRuns(const Call& call, LocalRank& rank, cuda::Stream stream);

 private:
  // Gives `on`, or a stream of the copies' own if that is null, the copies of a rank.
  Status StartOn(const Call& call, const Recipe& recipe, LocalRank& rank,
                 cuda::Stream ready, cuda::Stream on);
  // Waits for the other ranks, and leaves to NCCL what they come too late for.
  ErrorOr<bool> End(const Call& call, LocalRank& rank, cuda::Stream stream);

  NcclParts& parts_;
  const std::unique_ptr<PeerCopies> copies_;
  const double patience_seconds_;
  NcclEngine& nccl_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_COPY_ENGINE_H_
