#include "ffi/backends/nccl/nccl_communicator.h"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "ffi/backends/nccl/run_steps.h"

namespace jaxcomm {

Status NcclCommunicator::Settle(nccl::Result result, Rank& rank, const char* what) {
  if (result == nccl::kSuccess) return OkStatus();
  if (result != nccl::kInProgress) return library_.Check(result, what, rank.comm);
  // NCCL connects to a rank at the first use, which needs that rank's process.
  NcclPatience patience;
  patience.seconds = spec().timeout_seconds;
  patience.interrupted = [this] { return failed(); };
  return WaitUntilReady(library_, {rank.comm}, patience, what);
}

Status NcclCommunicator::Barrier(Rank& rank, cuda::Stream stream) {
  void* bytes = reinterpret_cast<void*>(rank.scratch);
  return Settle(library_.nccl.AllReduce(bytes, bytes, 1, nccl::Type::kFloat32,
                                        nccl::RedOp::kSum, rank.comm, stream),
                rank, "ncclAllReduce");
}

Status NcclCommunicator::Run(const Steps& steps, const Call& call, Rank& rank,
                             cuda::Stream stream) {
  if (rank.comm == nullptr && !steps.grouped.empty()) return failure();
  return RunSteps(library_, steps, call, rank.comm, stream,
                  [this, &rank](nccl::Result result, const char* what) {
                    return Settle(result, rank, what);
                  });
}

Status NcclCommunicator::Launch(const Call& call, Rank& rank, cuda::Stream stream) {
  std::shared_ptr<const Steps> steps;
  if (Status status =
          FindSteps(library_, *call.site, number_, rank.size, rank.rank, &steps);
      status.failure()) {
    return status;
  }
  const FlightRecorder::Ticket ticket =
      recorder().Start(*call.site, call.run_id, call.tag, rank.group, rank.rank);
  Status status = OkStatus();
  bool is_symmetric = false;
  {
    std::lock_guard<std::timed_mutex> lock(rank.launching);
    if (failed()) {
      status = failure();
    } else if (is_suspended_) {
      recorder().Finish(ticket, FlightRecorder::State::kFailed);
      return Suspended(call);
    } else {
      CurrentContext current(library_.cuda, rank.context);
      is_symmetric = IsSymmetric(call, rank);
      rank.in_flight.Begin(stream, call.may_be_captured, InFlight::Clock::now());
      const bool is_barrier = call.site->attributes().collective == "barrier";
      status = is_barrier && rank.size > 1 ? Barrier(rank, stream)
                                           : Run(*steps, call, rank, stream);
      if (status.success()) {
        rank.in_flight.End(stream, ticket, call.site->operation(), ++rank.operations,
                           InFlight::Clock::now());
      }
    }
  }
  if (status.failure()) {
    recorder().Finish(ticket, FlightRecorder::State::kFailed);
    return Ended(call, ErrorCode::kInternal, status.message());
  }
  Count(call, rank, is_symmetric ? &symmetric_calls_ : nullptr);
  return OkStatus();
}

Status NcclCommunicator::Suspended(const Call& call) const {
  return FailedPrecondition(call.site->description(), " (lane '", spec().lane,
                            "'): the communicator is suspended; call its resume() in "
                            "every process first");
}

Status NcclCommunicator::Ended(const Call& call, ErrorCode code,
                               std::string_view reason) {
  if (failed()) return failure();
  Status status(
      code, StrCat(call.site->description(), " (lane '", spec().lane, "'): ", reason,
                   ". The communicator has ended: call jaxcomm.finalize() in every "
                   "process, then jaxcomm.init()"));
  Fail(status, /*by_force=*/true);
  return status;
}

void NcclCommunicator::Count(const Call& call, const Rank& rank,
                             std::atomic<int64_t>* also) {
  if (&rank == ranks_[0].get()) {
    calls_[call.site->collective_index()].fetch_add(1, std::memory_order_relaxed);
    if (also != nullptr) also->fetch_add(1, std::memory_order_relaxed);
  }
  bytes_.fetch_add(call.site->operand_bytes(), std::memory_order_relaxed);
  WakeWatch();
}

}  // namespace jaxcomm
