// Results of failed operations as no number: on_failure="poison".
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_POISON_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_POISON_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ffi/backends/nccl/kernels/device_kernels.h"
#include "ffi/backends/nccl/library/library.h"
#include "ffi/base/status.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

// Behind every operation runs a kernel that sets every bit of the results if a word of
// pinned host memory is set by then.
class Poison {
 public:
  // Contexts: of the ranks here, by place.
  static ErrorOr<std::unique_ptr<Poison>> Create(
      const NcclLibrary& library, const std::vector<cuda::Context>& contexts);
  // Requires that no kernel reads the word any more.
  ~Poison();

  // Poisons all operations that are not done. To be called before any abort: what an
  // aborted kernel leaves behind may not be read.
  void Set() { __atomic_store_n(word_, 1u, __ATOMIC_SEQ_CST); }

  // Gives `stream` the kernel, behind the operation of a call.
  Status Give(const Call& call, size_t place, cuda::Stream stream) const;

 private:
  Poison(const NcclLibrary& library, cuda::Context context)
      : library_(library), context_(context) {}

  const NcclLibrary& library_;
  const cuda::Context context_;
  uint32_t* word_ = nullptr;
  std::vector<std::shared_ptr<const DeviceKernels>> kernels_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_POISON_H_
