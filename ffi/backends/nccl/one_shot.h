// Small sums in one step, between the devices of one process: every rank writes what it
// has into the memory of all others, and adds what it finds in its own.
//
// NCCL's call costs the host more than the GPU needs for such a sum, and in a chain of
// them that is what counts. This is one launch of a kernel (one_shot_kernels.h).
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ffi/backends/nccl/library.h"
#include "ffi/backends/nccl/one_shot_kernels.h"
#include "ffi/backends/nccl/peer_access.h"
#include "ffi/backends/nccl/steps.h"
#include "ffi/communicator.h"
#include "ffi/status.h"

namespace jaxcomm {

class OneShot {
 public:
  // Members: all ranks of all groups. Null where a device cannot reach another's memory
  // or the driver does not take the kernels. To be used once the streams, one of each
  // member, have come to their ends. `flag`: of the sum before the first.
  static Status Create(const NcclLibrary& library,
                       const std::vector<PeerMember>& members,
                       const std::vector<cuda::Stream>& streams,
                       std::unique_ptr<OneShot>* one_shot, uint32_t flag = 0);
  ~OneShot();

  // Whether the steps are sums for it: the same for every rank of a group. Those after
  // four thousand million are not, since flags are not used again.
  bool Takes(const Steps& steps, size_t member) const;

  // Gives `stream` the sums. By one thread at a time for each member.
  Status Launch(const Steps& steps, const Call& call, size_t member,
                cuda::Stream stream);

  // Ends what waits for other ranks, without a result, now and from now on.
  void Stop();

  int64_t device_bytes() const {
    return static_cast<int64_t>(OneShotArguments::kInboxBytes * lanes_.size());
  }

 private:
  struct Kernels;

  struct Lane {
    PeerMember member;
    std::shared_ptr<const Kernels> kernels;
    cuda::Pointer inbox = 0;
    // The last sum, and the stream it was given to: sums keep their order.
    cuda::Event last = nullptr;
    cuda::Stream stream = nullptr;
    OneShotArguments arguments;
  };

  explicit OneShot(const NcclLibrary& library) : library_(library) {}

  // Those of a context, which communicators share.
  static std::shared_ptr<const Kernels> KernelsOf(const NcclLibrary& library,
                                                  cuda::Context context);
  Status Allocate(const std::vector<cuda::Stream>& streams, uint32_t flag);

  const NcclLibrary& library_;
  uint32_t* stop_ = nullptr;  // which devices read
  std::vector<Lane> lanes_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_H_
