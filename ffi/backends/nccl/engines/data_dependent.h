// Collectives whose moves depend on numbers that devices hold: the host of every rank
// reads those of all ranks, checks them, and has NCCL send no more than they say. Or,
// if the policy allows it, GPUs do up to a size (device_sized.h).
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_DATA_DEPENDENT_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_DATA_DEPENDENT_H_

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "ffi/backends/nccl/engines/device_sized.h"
#include "ffi/backends/nccl/engines/nccl_engine.h"
#include "ffi/backends/nccl/exchange.h"
#include "ffi/backends/nccl/plans/steps.h"
#include "ffi/base/status.h"

namespace jaxcomm {

class DataDependent {
 public:
  // The most bytes of offsets and sizes of a rank: 1024 slices of ragged_all_to_all
  // with 32-bit numbers.
  static constexpr size_t kMostBytes = RaggedRefusal::kMostBytes;

  // `arenas`: for GPUs that read sizes.
  static ErrorOr<std::unique_ptr<DataDependent>> Create(
      NcclParts& parts, NcclEngine& nccl, const EnginePolicy& policy,
      std::unique_ptr<PeerMemory> arenas);
  // Makes the memory in which ranks exchange their numbers. The first call does, if
  // nobody has. A program's lowering is better: CUDA may wait for what a device is at.
  Status Prepare() { return numbers_->Prepare(); }
  // Connects what needs the other processes: every process calls it.
  Status Connect() {
    return device_sized_ == nullptr ? OkStatus() : device_sized_->Share();
  }

  // Waits until `stream` has come to the call, and all ranks have said their numbers:
  // two operations of the rank, in its flight record too. Numbers that do not fit are
  // refused on all ranks, and nothing else fails.
  Status Enqueue(const Call& call, LocalRank& rank, cuda::Stream stream);

  // Ends what uses memory of other ranks, before they free it.
  void Leave() {
    if (device_sized_ != nullptr) device_sized_->Leave();
  }
  // Whether GPUs read sizes: "yes" or "no: " and why.
  std::string device_sizes_text() const {
    if (device_sized_ == nullptr) return "no: not asked for";
    const std::string& reason = device_sized_->reason();
    return reason.empty() ? "yes" : StrCat("no: ", reason);
  }
  int64_t device_bytes() const {
    return numbers_->device_bytes() +
           (device_sized_ == nullptr ? 0 : device_sized_->device_bytes());
  }

 private:
  DataDependent(NcclParts& parts, NcclEngine& nccl)
      : parts_(parts),
        nccl_(nccl),
        numbers_(std::make_unique<Exchange>(parts, kMostBytes)),
        calling_(parts.ranks.size()) {}

  Status GiveNumbers(const Call& call, LocalRank& rank, cuda::Stream stream);
  // The watch sees an exchange that is late, and ends the communicator.
  Status Wait(const Call& call, const LocalRank& rank, cuda::Stream stream);
  ErrorOr<Steps> MakeStepsOf(const Call& call, const LocalRank& rank) const;

  NcclParts& parts_;
  NcclEngine& nccl_;
  const std::unique_ptr<Exchange> numbers_;
  std::unique_ptr<DeviceSized> device_sized_;  // null where hosts read all numbers
  std::deque<Mutex> calling_;                  // by place
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_DATA_DEPENDENT_H_
