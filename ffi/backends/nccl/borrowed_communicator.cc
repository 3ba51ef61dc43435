#include "ffi/backends/nccl/borrowed_communicator.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "ffi/backends/nccl/run_steps.h"
#include "ffi/backends/nccl/world.h"
#include "ffi/core/last_resort.h"
#include "ffi/flight/flight_dump.h"

namespace jaxcomm {

BorrowedCommunicator::BorrowedCommunicator(CommunicatorSpec spec,
                                           const NcclLibrary& library,
                                           const std::vector<Device>& devices,
                                           Wanted wanted, OnFailure on_failure)
    : Communicator(std::move(spec)),
      library_(library),
      wanted_(std::move(wanted)),
      on_failure_(on_failure),
      number_(NextCommunicatorNumber()) {
  for (const Device& device : devices) {
    for (size_t group = 0; group < this->spec().groups.size(); ++group) {
      const auto& of = this->spec().groups[group];
      const auto found = std::find(of.begin(), of.end(), device.id);
      if (found == of.end()) continue;
      auto rank = std::make_unique<Rank>(library_, recorder());
      rank->ordinal = device.ordinal;
      rank->device = device.id;
      rank->group = static_cast<int>(group);
      rank->rank = static_cast<int>(found - of.begin());
      rank->size = static_cast<int>(of.size());
      cuda::Device number = 0;
      library_.cuda.DeviceGet(&number, device.ordinal);
      library_.cuda.DevicePrimaryCtxRetain(&rank->context, number);
      ranks_.push_back(std::move(rank));
    }
  }
}

BorrowedCommunicator::~BorrowedCommunicator() {
  for (auto& rank : ranks_) {
    {
      CurrentContext current(library_.cuda, rank->context);
      rank->in_flight.Release();
      if (rank->scratch != 0) library_.cuda.MemFree(rank->scratch);
    }
    cuda::Device number = 0;
    library_.cuda.DeviceGet(&number, rank->ordinal);
    library_.cuda.DevicePrimaryCtxRelease(number);
  }
}

Status BorrowedCommunicator::Prepare() {
  for (auto& rank : ranks_) {
    RETURN_IF_ERROR(PrepareDeviceStop(library_, rank->context));
    CurrentContext current(library_.cuda, rank->context);
    RETURN_IF_ERROR(
        library_.Check(library_.cuda.MemAlloc(&rank->scratch, 64), "cuMemAlloc"));
    RETURN_IF_ERROR(rank->in_flight.Prepare());
  }
  return OkStatus();
}

Status BorrowedCommunicator::Settle(nccl::Result result, nccl::Comm comm,
                                    const char* what) {
  if (result != nccl::kInProgress) return library_.Check(result, what, comm);
  // XLA's do not block if it was told so; what follows on the stream is to find the
  // operation there.
  const auto interrupted = [this] { return failed_.load(std::memory_order_acquire); };
  return WaitUntilReady(library_, {comm}, {spec().timeout_seconds, interrupted}, what);
}

Status BorrowedCommunicator::Barrier(const Call& call, Rank& rank, void* stream) {
  void* const bytes = reinterpret_cast<void*>(rank.scratch);
  const auto comm = static_cast<nccl::Comm>(call.borrowed);
  return Settle(library_.nccl.AllReduce(bytes, bytes, 1, nccl::Type::kFloat32,
                                        nccl::RedOp::kSum, comm, stream),
                comm, "ncclAllReduce");
}

Status BorrowedCommunicator::Run(const Call& call, Rank& rank, void* stream) {
  const auto comm = static_cast<nccl::Comm>(call.borrowed);
  if (comm == nullptr && rank.size > 1) {
    return Status(ErrorCode::kInternal, "XLA lent no communicator for this operation");
  }
  if (call.site->kind() == Plan::Kind::kBarrier && rank.size > 1) {
    return Barrier(call, rank, stream);
  }
  const Steps* steps = nullptr;
  RETURN_IF_ERROR(
      FindSteps(library_, *call.site, number_, rank.size, rank.rank, &steps));
  return RunSteps(library_, *steps, call, comm, stream,
                  [this, comm](nccl::Result result, const char* what) {
                    return Settle(result, comm, what);
                  });
}

Status BorrowedCommunicator::Enqueue(const Call& call, void* stream) {
  const auto found = std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
    return rank->ordinal == call.device_id;
  });
  if (found == ranks_.end()) {
    return FailedPrecondition(call.site->description(), ": device ", call.device_id,
                              " is not in the communicator it was compiled for");
  }
  Rank& rank = **found;
  if (failed_.load(std::memory_order_acquire)) return failure();
  if (DevicesAreStopped()) return DevicesStoppedError();
  const FlightRecorder::Ticket ticket = recorder().Start(
      call.site->operation(), call.run_id, call.tag, rank.group, rank.rank);
  Status status = OkStatus();
  {
    std::lock_guard<std::mutex> lock(rank.launching);
    CurrentContext current(library_.cuda, rank.context);
    rank.in_flight.Begin(stream, call.may_be_captured, InFlight::Clock::now());
    status = Run(call, rank, stream);
    if (status.success()) {
      rank.in_flight.End(stream, {ticket, call.site->operation(), ++rank.operations},
                         InFlight::Clock::now());
    }
  }
  if (status.failure()) {
    recorder().Finish(ticket, FlightRecorder::State::kFailed);
    const bool is_late = *status.errc() == ErrorCode::kDeadlineExceeded;
    Status told(is_late ? *status.errc() : ErrorCode::kInternal,
                StrCat(call.site->description(), " (lane '", spec().lane,
                       "', XLA's communicator): ", status.message()));
    // The next call would wait for as long.
    if (is_late) Fail(told);
    return told;
  }
  rank.counts.Add(*call.site);
  WakeWatchdog();
  return OkStatus();
}

bool BorrowedCommunicator::Poll() {
  if (failed_.load(std::memory_order_acquire)) return false;
  if (DevicesAreStopped()) {
    for (auto& rank : ranks_) rank->in_flight.Fail();
    return false;
  }
  const auto patience = std::chrono::duration_cast<InFlight::Clock::duration>(
      std::chrono::duration<double>(spec().timeout_seconds));
  bool more = false;
  for (auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->context);
    const InFlight::Overdue overdue =
        rank->in_flight.Poll(InFlight::Clock::now(), patience);
    more |= rank->in_flight.size() > 0;
    if (!overdue.found) continue;
    const bool is_late = overdue.status.success();
    Fail(Status(
        is_late ? ErrorCode::kDeadlineExceeded : ErrorCode::kUnavailable,
        StrCat(Describe(overdue, spec(), rank->rank, rank->size, rank->device),
               is_late ? DescribeLate(spec()) : std::string(overdue.status.message()),
               ". The communicator is XLA's, and the GPUs of this process are stopped: "
               "every use of them raises from now on. End this process and start it "
               "anew")));
    DumpFlightRecords(is_late ? "timeout" : "error");
    for (auto& each : ranks_) each->in_flight.Fail();
    return false;
  }
  return more;
}

void BorrowedCommunicator::Fail(const Status& reason) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    failure_ = reason;
    failed_.store(true, std::memory_order_release);
  }
  const std::string text(reason.message());
  RecordFirstFailure(text);
  if (on_failure_ == OnFailure::kExit) EndProcess(text);
  StopDevices(text);
}

void BorrowedCommunicator::Abort(const Status&) { Unwatch(*this); }

CommunicatorStats BorrowedCommunicator::stats() const {
  CommunicatorStats stats;
  for (const auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->context);
    rank->in_flight.Refresh();
    stats.in_flight += rank->in_flight.size();
    stats.bytes += rank->counts.bytes();
  }
  ranks_[0]->counts.Tell(&stats);
  stats.host_bytes = recorder().host_bytes();
  return stats;
}

}  // namespace jaxcomm
