#include "ffi/backends/nccl/borrowed_communicator.h"

#include <algorithm>
#include <utility>

#include "ffi/backends/nccl/run_steps.h"

namespace jaxcomm {

BorrowedCommunicator::BorrowedCommunicator(CommunicatorSpec spec,
                                           const NcclLibrary& library,
                                           const std::vector<Device>& devices,
                                           Wanted wanted)
    : Communicator(std::move(spec)),
      library_(library),
      wanted_(std::move(wanted)),
      number_(NextCommunicatorNumber()) {
  for (const Device& device : devices) {
    for (size_t group = 0; group < this->spec().groups.size(); ++group) {
      const auto& of = this->spec().groups[group];
      const auto found = std::find(of.begin(), of.end(), device.id);
      if (found == of.end()) continue;
      Rank rank;
      rank.ordinal = device.ordinal;
      rank.group = static_cast<int>(group);
      rank.rank = static_cast<int>(found - of.begin());
      rank.size = static_cast<int>(of.size());
      cuda::Device number = 0;
      library_.cuda.DeviceGet(&number, device.ordinal);
      library_.cuda.DevicePrimaryCtxRetain(&rank.context, number);
      ranks_.push_back(rank);
    }
  }
}

BorrowedCommunicator::~BorrowedCommunicator() {
  for (Rank& rank : ranks_) {
    {
      CurrentContext current(library_.cuda, rank.context);
      if (rank.scratch != 0) library_.cuda.MemFree(rank.scratch);
    }
    cuda::Device number = 0;
    library_.cuda.DeviceGet(&number, rank.ordinal);
    library_.cuda.DevicePrimaryCtxRelease(number);
  }
}

xla::ffi::Future BorrowedCommunicator::Execute(const Call& call) {
  return FailedFuture(FailedPrecondition(call.site->description(),
                                         ": XLA lends communicators of GPUs only"));
}

Status BorrowedCommunicator::Barrier(const Call& call, Rank& rank, void* stream) {
  if (rank.scratch == 0) {
    if (Status status =
            library_.Check(library_.cuda.MemAlloc(&rank.scratch, 64), "cuMemAlloc");
        status.failure()) {
      return status;
    }
  }
  void* const bytes = reinterpret_cast<void*>(rank.scratch);
  const auto comm = static_cast<nccl::Comm>(call.borrowed);
  return library_.Check(library_.nccl.AllReduce(bytes, bytes, 1, nccl::Type::kFloat32,
                                                nccl::RedOp::kSum, comm, stream),
                        "ncclAllReduce", comm);
}

Status BorrowedCommunicator::Enqueue(const Call& call, void* stream) {
  const auto found = std::find_if(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
    return rank.ordinal == call.device_id;
  });
  if (found == ranks_.end()) {
    return FailedPrecondition(call.site->description(), ": device ", call.device_id,
                              " is not in the communicator it was compiled for");
  }
  std::shared_ptr<const Steps> steps;
  if (Status status =
          FindSteps(library_, *call.site, number_, found->size, found->rank, &steps);
      status.failure()) {
    return status;
  }
  const auto comm = static_cast<nccl::Comm>(call.borrowed);
  if (comm == nullptr && found->size > 1) {
    return FailedPrecondition(call.site->description(),
                              ": XLA lent no communicator for this operation");
  }
  const FlightRecorder::Ticket ticket =
      recorder().Start(*call.site, call.run_id, call.tag, found->group, found->rank);
  Status status = OkStatus();
  if (call.site->attributes().collective == "barrier" && found->size > 1) {
    status = Barrier(call, *found, stream);
  } else {
    status = RunSteps(library_, *steps, call, comm, stream,
                      [this, comm](nccl::Result result, const char* what) {
                        return result == nccl::kInProgress
                                   ? OkStatus()
                                   : library_.Check(result, what, comm);
                      });
  }
  // When it is done, and whether, XLA alone sees.
  recorder().Finish(ticket, status.success() ? FlightRecorder::State::kCompleted
                                             : FlightRecorder::State::kFailed);
  if (status.failure()) {
    return Status(ErrorCode::kInternal,
                  StrCat(call.site->description(), " (lane '", spec().lane,
                         "', XLA's communicator): ", status.message()));
  }
  if (found == ranks_.begin()) {
    calls_[call.site->collective_index()].fetch_add(1, std::memory_order_relaxed);
  }
  bytes_.fetch_add(call.site->operand_bytes(), std::memory_order_relaxed);
  return OkStatus();
}

void BorrowedCommunicator::Abort(const Status&) {}

CommunicatorStats BorrowedCommunicator::stats() const {
  CommunicatorStats stats;
  stats.bytes = bytes_.load(std::memory_order_relaxed);
  stats.host_bytes = recorder().host_bytes();
  for (int i = 0; i < kNumCollectives; ++i) {
    const int64_t count = calls_[i].load(std::memory_order_relaxed);
    if (count > 0) stats.calls.emplace_back(kCollectives[i].name, count);
  }
  return stats;
}

}  // namespace jaxcomm
