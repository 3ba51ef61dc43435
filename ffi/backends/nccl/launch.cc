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
  if (Status status = CheckPlaces(steps, call, rank); status.failure()) return status;
  return RunSteps(library_, steps, call, rank.comm, stream,
                  [this, &rank](nccl::Result result, const char* what) {
                    return Settle(result, rank, what);
                  });
}

template <typename GiveIt>
Status NcclCommunicator::Give(const Call& call, Rank& rank, cuda::Stream stream,
                              InFlight::Named named, const GiveIt& give_it) {
  Status status = OkStatus();
  {
    // From before it is known that nothing failed until the stream has it: what fails
    // meanwhile takes it for an operation on its way.
    const Counted counted(num_giving_);
    std::lock_guard<std::timed_mutex> lock(rank.launching);
    status = Refusal();
    if (status.failure()) {
      // Said below.
    } else if (is_suspended_) {
      recorder().Finish(named.ticket, FlightRecorder::State::kFailed);
      return Suspended(call);
    } else {
      CurrentContext current(library_.cuda, rank.context);
      rank.in_flight.Begin(stream, call.may_be_captured, InFlight::Clock::now());
      status = give_it();
      if (status.success() && poisoned_ != nullptr) {
        status = GivePoison(call, rank, stream);
      }
      if (status.success()) {
        if (named.sequence == 0) named.sequence = ++rank.operations;
        rank.in_flight.End(stream, named, InFlight::Clock::now());
      }
    }
  }
  if (status.failure()) {
    recorder().Finish(named.ticket, FlightRecorder::State::kFailed);
    if (!failed() && status.errc() == ErrorCode::kFailedPrecondition) {
      return Refused(call, status.message());
    }
    return Ended(call, rank, ErrorCode::kInternal,
                 StrCat("rank ", rank.rank, " of ", rank.size, " (device ", rank.device,
                        "): ", status.message()));
  }
  WakeWatchdog();
  return OkStatus();
}

Status NcclCommunicator::Launch(const Call& call, Rank& rank, cuda::Stream stream) {
  const Steps* steps = nullptr;
  if (Status status =
          FindSteps(library_, *call.site, number_, rank.size, rank.rank, &steps);
      status.failure()) {
    return status;
  }
  const FlightRecorder::Ticket ticket = recorder().Start(
      call.site->operation(), call.run_id, call.tag, rank.group, rank.rank);
  auto kind = CallCounts::Kind::kOrdinary;
  Status status = Give(call, rank, stream, {ticket, call.site->operation(), 0}, [&] {
    if (one_shot_ != nullptr && !call.may_be_captured &&
        one_shot_->Takes(*steps, rank.place)) {
      kind = CallCounts::Kind::kOneShot;
      return one_shot_->Launch(*steps, call, rank.place, stream);
    }
    if (IsSymmetric(call, rank)) kind = CallCounts::Kind::kSymmetric;
    const bool is_barrier = call.site->kind() == Plan::Kind::kBarrier;
    return is_barrier && rank.size > 1 ? Barrier(rank, stream)
                                       : Run(*steps, call, rank, stream);
  });
  if (status.success()) rank.counts.Add(*call.site, kind);
  return status;
}

Status NcclCommunicator::LaunchRest(const PeerCopies::Rest& rest, const Call& call,
                                    Rank& rank, cuda::Stream stream) {
  Call left = call;
  left.operands = rest.operands.data();
  left.results = rest.results.data();
  return Give(call, rank, stream, rest.named,
              [&] { return Run(rest.steps, left, rank, stream); });
}

Status NcclCommunicator::Suspended(const Call& call) const {
  return Refused(call,
                 "the communicator is suspended; call its resume() in every "
                 "process first");
}

Status NcclCommunicator::FailureOf(const Call& call, const Rank& rank) const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failure_.success() || !failed_between_calls_) return failure_;
  return Status(*failure_.errc(),
                StrCat(call.site->description(), ", rank ", rank.rank, " of ",
                       rank.size, " (device ", rank.device, "): ", failure_.message()));
}

Status NcclCommunicator::Ended(const Call& call, const Rank& rank, ErrorCode code,
                               std::string_view reason) {
  if (failed()) return FailureOf(call, rank);
  if (DevicesAreStopped()) return DevicesStoppedError();
  Status status(
      code, StrCat(call.site->description(), " (lane '", spec().lane, "'): ", reason));
  Fail(status);
  return FailureOf(call, rank);
}

}  // namespace jaxcomm
