// Small collectives by a kernel of ours (one_shot.h).
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ONE_SHOT_ENGINE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ONE_SHOT_ENGINE_H_

#include <memory>
#include <utility>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/engines/engine.h"
#include "ffi/backends/nccl/engines/one_shot.h"

namespace jaxcomm {

class OneShotEngine final : public Engine {
 public:
  OneShotEngine(NcclParts& parts, std::unique_ptr<OneShot> kernels)
      : parts_(parts), kernels_(std::move(kernels)) {}

  Status Enqueue(const Call& call, const Recipe& recipe, LocalRank& rank,
                 cuda::Stream stream) override;
  void Abort(LocalRank&) override { kernels_->Stop(); }

  OneShot& kernels() { return *kernels_; }

 private:
  NcclParts& parts_;
  const std::unique_ptr<OneShot> kernels_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ONE_SHOT_ENGINE_H_
