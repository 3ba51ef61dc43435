// A communicator that has none of NCCL's: for each operation XLA lends its own, which
// XLA makes, orders, shares with its own collectives, and ends. What does not end
// cannot be aborted here: the devices are stopped, or the process ends.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_BORROWED_COMMUNICATOR_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_BORROWED_COMMUNICATOR_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ffi/backends/nccl/call_counts.h"
#include "ffi/backends/nccl/device_stop.h"
#include "ffi/backends/nccl/in_flight.h"
#include "ffi/backends/nccl/library.h"
#include "ffi/core/communicator.h"
#include "ffi/core/watchdog.h"

namespace jaxcomm {

class BorrowedCommunicator final : public Communicator, public Watched {
 public:
  struct Device {
    int64_t id = 0;
    int ordinal = 0;
  };

  using Wanted = WantedCommunicator;

  BorrowedCommunicator(CommunicatorSpec spec, const NcclLibrary& library,
                       const std::vector<Device>& devices, Wanted wanted,
                       OnFailure on_failure);
  ~BorrowedCommunicator() override;

  // Makes what it needs of the devices. Someone is to Watch() it.
  Status Prepare();

  const Wanted* wanted() const override { return &wanted_; }

  // `call.borrowed` is XLA's.
  Status Enqueue(const Call& call, void* stream) override;
  void Abort(const Status& reason) override;
  CommunicatorStats stats() const override;
  // Watched:
  bool Poll() override;
  double poll_seconds() const override { return spec().timeout_seconds + 10; }
  const char* stuck_text() const override { return kDriverStuck; }

 private:
  struct Rank {
    Rank(const NcclLibrary& library, FlightRecorder& recorder)
        : in_flight(library, recorder) {}

    int ordinal = 0;
    int64_t device = 0;  // global id
    int group = 0, rank = 0, size = 0;
    cuda::Context context = nullptr;
    cuda::Pointer scratch = 0;
    std::mutex launching;     // held while a stream is given an operation
    uint64_t operations = 0;  // likewise
    InFlight in_flight;
    CallCounts counts;
  };

  Status Run(const Call& call, Rank& rank, void* stream);
  Status Barrier(const Call& call, Rank& rank, void* stream);
  // Waits for what a communicator that does not block has yet to give the stream.
  Status Settle(nccl::Result result, nccl::Comm comm, const char* what);
  Status failure() const {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    return failure_;
  }
  // Sees to it that no result of what is on its way is read.
  void Fail(const Status& reason);

  const NcclLibrary& library_;
  const Wanted wanted_;
  const OnFailure on_failure_;
  const uint64_t number_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  Status failure_ = OkStatus();
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_BORROWED_COMMUNICATOR_H_
