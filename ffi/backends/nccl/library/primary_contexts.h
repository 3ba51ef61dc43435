// The primary CUDA contexts of the devices of this process, and the access of one to
// the memory of another.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_PRIMARY_CONTEXTS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_PRIMARY_CONTEXTS_H_

#include <cstddef>
#include <vector>

#include "ffi/backends/nccl/library/library.h"
#include "ffi/backends/nccl/library/rank_facts.h"
#include "ffi/base/status.h"

namespace jaxcomm {

// Retains them while it lives, and prepares what stops a device after a failure.
class PrimaryContexts {
 public:
  PrimaryContexts(const NcclLibrary& library, const std::vector<NcclDevice>& devices);
  ~PrimaryContexts();
  PrimaryContexts(const PrimaryContexts&) = delete;
  PrimaryContexts& operator=(const PrimaryContexts&) = delete;

  // Whether all could be had. If not, the last one may be null.
  const Status& status() const { return status_; }
  // In the order of the devices.
  cuda::Context operator[](size_t i) const { return contexts_[i]; }
  const std::vector<cuda::Context>& all() const { return contexts_; }

 private:
  Status Retain(int ordinal);

  const NcclLibrary& library_;
  std::vector<cuda::Device> devices_;
  std::vector<cuda::Context> contexts_;
  Status status_;
};

// Whether every device reaches the memory of the others of its group; from now on, if
// they can.
bool CanReachPeers(const NcclLibrary& library, const std::vector<RankFacts>& ranks);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_PRIMARY_CONTEXTS_H_
