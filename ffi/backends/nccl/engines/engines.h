// The engines of one communicator: makes them, and has the right one do a call.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ENGINES_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ENGINES_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/engines/copy_engine.h"
#include "ffi/backends/nccl/engines/data_dependent.h"
#include "ffi/backends/nccl/engines/mapped_copies.h"
#include "ffi/backends/nccl/engines/nccl_engine.h"
#include "ffi/backends/nccl/engines/one_shot_engine.h"
#include "ffi/backends/nccl/failure/health.h"
#include "ffi/backends/nccl/plans/engine_choice.h"
#include "ffi/backends/nccl/plans/recipe.h"
#include "ffi/backends/nccl/queue/local_rank.h"

namespace jaxcomm {

class Engines {
 public:
  // NCCL's alone.
  Engines(NcclParts& parts, EnginePolicy policy);

  // Makes the others that the policy allows and that can serve these ranks.
  Status Make(FlightRecorder& recorder);
  // Connects what needs the other processes: every process calls it.
  Status Connect();

  // Makes what calls need whose moves depend on numbers that devices hold.
  Status PrepareDataDependent() { return data_dependent_->Prepare(); }

  // See Engine.
  Status Enqueue(const Call& call, LocalRank& rank, cuda::Stream stream);
  Status Start(const Call& call, LocalRank& rank, cuda::Stream stream);
  Status Done(const Call& call, LocalRank& rank, cuda::Stream stream);

  // Drops what earlier runs than that of a call started on the rank's device and did
  // not end, and has `stream` wait for what is on its way.
  Status ForgetEarlierRuns(const Call& call, LocalRank& rank, cuda::Stream stream) {
    if (copy_ == nullptr) return OkStatus();
    return copy_->ForgetEarlierRuns(call, rank, stream);
  }

  // Whether our kernel does small sums: "yes" or "no: " and why.
  std::string one_shot_text() const;
  // Likewise, whether copy engines move what only moves, in all groups.
  std::string copies_text() const;
  // Likewise, whether GPUs read the sizes of ragged_all_to_all.
  std::string device_sizes_text() const { return data_dependent_->device_sizes_text(); }
  int64_t device_bytes() const;

  NcclEngine& nccl() { return nccl_; }
  // Ends our kernels, before the memory that they use.
  void Leave();

 private:
  struct Chosen {
    const Recipe* recipe = nullptr;
    Engine* engine = nullptr;
  };

  ErrorOr<Chosen> Find(const Call& call, LocalRank& rank, bool is_start);
  EngineKind ChooseFor(const CallFacts& facts, size_t place) const;
  bool CanCopy(size_t place) const {
    return copy_ != nullptr && copy_->takes_part(place);
  }
  bool CanMap(size_t place) const {
    return mapped_ != nullptr && mapped_->takes_part(place);
  }

  NcclParts& parts_;
  const EnginePolicy policy_;
  Recipes recipes_;
  NcclEngine nccl_;
  std::unique_ptr<DataDependent> data_dependent_;
  std::unique_ptr<CopyEngine> copy_;         // null where NCCL moves all
  std::unique_ptr<MappedCopies> mapped_;     // null where no process needs it
  std::unique_ptr<OneShotEngine> one_shot_;  // null where NCCL adds all
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_ENGINES_H_
