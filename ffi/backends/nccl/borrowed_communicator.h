// A communicator that has none of NCCL's: for each operation XLA lends its own, which
// XLA makes, orders, shares with its own collectives, and ends. An operation that does
// not end cannot be aborted here: the devices are stopped, or the process ends.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_BORROWED_COMMUNICATOR_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_BORROWED_COMMUNICATOR_H_

#include <memory>
#include <vector>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/engines/engines.h"
#include "ffi/backends/nccl/health.h"
#include "ffi/backends/nccl/primary_contexts.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

class BorrowedCommunicator final
    : public Communicator,
      public std::enable_shared_from_this<BorrowedCommunicator> {
 public:
  BorrowedCommunicator(CommunicatorSpec spec, const NcclLibrary& library,
                       const std::vector<NcclDevice>& devices, Borrowed wanted,
                       OnFailure on_failure);
  ~BorrowedCommunicator() override;

  // Makes what it needs of the devices.
  Status Prepare();
  // Has the watch poll it.
  Status BeWatched() { return parts_.health.BeWatched(); }
  // Looks for what is done, has failed or is late; returns whether anything is left.
  bool Poll() { return parts_.health.Poll(); }

  const Borrowed* borrowed() const override { return &wanted_; }
  // `call.borrowed` is XLA's.
  Status Enqueue(const Call& call, void* stream) override;
  // XLA ends what is in flight.
  void Abort(const Status&) override { Unwatch(parts_.health); }
  CommunicatorStats stats() const override;

 private:
  const Borrowed wanted_;
  const PrimaryContexts contexts_;
  NcclParts parts_;  // without communicators, but with their scratch memory
  Engines engines_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_BORROWED_COMMUNICATOR_H_
