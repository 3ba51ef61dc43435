#include "ffi/backends/nccl/nccl_communicator.h"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace jaxcomm {

Status NcclCommunicator::GetSteps(const Call& call, const Rank& rank,
                                  std::shared_ptr<const Steps>* steps) {
  Status status = OkStatus();
  const uint64_t place = number_ << 40 | static_cast<uint64_t>(rank.rank) << 20 |
                         static_cast<uint64_t>(rank.size);
  const auto make = [&]() -> std::shared_ptr<const void> {
    Plan plan;
    auto made = std::make_shared<Steps>();
    status = call.site->MakePlan(rank.size, nullptr, &plan);
    if (status.success()) {
      status = MakeSteps(*call.site, plan, rank.size, rank.rank,
                         library_.nccl.AlltoAll != nullptr, made.get());
    }
    return status.success() ? made : nullptr;
  };
  // By reference: a copy would be allocated, for every call.
  *steps =
      std::static_pointer_cast<const Steps>(call.site->Derived(place, std::cref(make)));
  if (*steps == nullptr && status.success()) {
    status = InvalidArgument(call.site->description(), ": NCCL cannot do this");
  }
  return status;
}

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

Status NcclCommunicator::RunStep(const Step& step, const Call& call, Rank& rank,
                                 cuda::Stream stream) {
  const char* from = static_cast<const char*>(call.operands[step.leaf]) + step.from;
  char* to = static_cast<char*>(call.results[step.leaf]) + step.to;
  const nccl::Api& api = library_.nccl;
  switch (step.kind) {
    case Step::Kind::kCopy:
      if (from == to) return OkStatus();
      return library_.Check(
          library_.cuda.MemcpyDtoDAsync(reinterpret_cast<cuda::Pointer>(to),
                                        reinterpret_cast<cuda::Pointer>(from),
                                        step.count, stream),
          "cuMemcpyDtoDAsync");
    case Step::Kind::kZero:
      return library_.Check(
          library_.cuda.MemsetD8Async(reinterpret_cast<cuda::Pointer>(to), 0,
                                      step.count, stream),
          "cuMemsetD8Async");
    case Step::Kind::kSend:
      return Settle(api.Send(from, step.count, step.type, step.peer, rank.comm, stream),
                    rank, "ncclSend");
    case Step::Kind::kRecv:
      return Settle(api.Recv(to, step.count, step.type, step.peer, rank.comm, stream),
                    rank, "ncclRecv");
    case Step::Kind::kAllReduce:
      return Settle(
          api.AllReduce(from, to, step.count, step.type, step.op, rank.comm, stream),
          rank, "ncclAllReduce");
    case Step::Kind::kReduce:
      return Settle(api.Reduce(from, to, step.count, step.type, step.op, step.peer,
                               rank.comm, stream),
                    rank, "ncclReduce");
    case Step::Kind::kReduceScatter:
      return Settle(api.ReduceScatter(from, to, step.count, step.type, step.op,
                                      rank.comm, stream),
                    rank, "ncclReduceScatter");
    case Step::Kind::kAllGather:
      return Settle(api.AllGather(from, to, step.count, step.type, rank.comm, stream),
                    rank, "ncclAllGather");
    case Step::Kind::kAllToAll:
      return Settle(api.AlltoAll(from, to, step.count, step.type, rank.comm, stream),
                    rank, "ncclAlltoAll");
    case Step::Kind::kBroadcast:
      return Settle(
          api.Broadcast(from, to, step.count, step.type, step.peer, rank.comm, stream),
          rank, "ncclBroadcast");
  }
  return OkStatus();
}

Status NcclCommunicator::Run(const Steps& steps, const Call& call, Rank& rank,
                             cuda::Stream stream) {
  Status status = OkStatus();
  for (const Step& step : steps.local) {
    if (status.success()) status = RunStep(step, call, rank, stream);
  }
  if (status.failure() || steps.grouped.empty()) return status;
  if (rank.comm == nullptr) return failure();
  if (steps.grouped.size() == 1) {
    return RunStep(steps.grouped[0], call, rank, stream);
  }
  status = library_.Check(library_.nccl.GroupStart(), "ncclGroupStart");
  if (status.failure()) return status;
  for (const Step& step : steps.grouped) {
    if (status.success()) status = RunStep(step, call, rank, stream);
  }
  Status ended = Settle(library_.nccl.GroupEnd(), rank, "ncclGroupEnd");
  return status.failure() ? status : ended;
}

Status NcclCommunicator::Launch(const Call& call, Rank& rank, cuda::Stream stream) {
  std::shared_ptr<const Steps> steps;
  if (Status status = GetSteps(call, rank, &steps); status.failure()) return status;
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
      return FailedPrecondition(call.site->description(), " (lane '", spec().lane,
                                "'): the communicator is suspended; call its resume() "
                                "in every process first");
    } else {
      CurrentContext current(library_.cuda, rank.context);
      is_symmetric = IsSymmetric(call, rank);
      rank.in_flight.Begin(stream);
      const bool is_barrier = call.site->attributes().collective == "barrier";
      status = is_barrier && rank.size > 1 ? Barrier(rank, stream)
                                           : Run(*steps, call, rank, stream);
      if (status.success()) {
        rank.in_flight.End(stream, ticket, call.site->operation());
      }
    }
  }
  if (status.failure()) {
    recorder().Finish(ticket, FlightRecorder::State::kFailed);
    if (!failed()) {
      status = Status(ErrorCode::kInternal,
                      StrCat(call.site->description(), " (lane '", spec().lane,
                             "'): ", status.message(),
                             ". The communicator has ended: call jaxcomm.finalize() "
                             "in every process, then jaxcomm.init()"));
      Fail(status, /*by_force=*/true);
    }
    return status;
  }
  if (&rank == ranks_[0].get()) {
    calls_[call.site->collective_index()].fetch_add(1, std::memory_order_relaxed);
    if (is_symmetric) symmetric_calls_.fetch_add(1, std::memory_order_relaxed);
  }
  bytes_.fetch_add(call.site->operand_bytes(), std::memory_order_relaxed);
  WakeWatch();
  return OkStatus();
}

}  // namespace jaxcomm
