#include "ffi/backends/nccl/run_steps.h"

namespace jaxcomm {
namespace {

Status RunStep(const NcclLibrary& library, const Step& step, const Call& call,
               nccl::Comm comm, cuda::Stream stream, const FinishCall& finish) {
  const char* from = static_cast<const char*>(call.operands[step.leaf]) + step.from;
  char* to = static_cast<char*>(call.results[step.leaf]) + step.to;
  const nccl::Api& api = library.nccl;
  switch (step.kind) {
    case Step::Kind::kCopy:
    case Step::Kind::kZero:
      return RunLocalStep(library, step, call.operands, call.results, stream);
    case Step::Kind::kSend:
      return finish(api.Send(from, step.count, step.type, step.peer, comm, stream),
                    "ncclSend");
    case Step::Kind::kRecv:
      return finish(api.Recv(to, step.count, step.type, step.peer, comm, stream),
                    "ncclRecv");
    case Step::Kind::kAllReduce:
      return finish(
          api.AllReduce(from, to, step.count, step.type, step.op, comm, stream),
          "ncclAllReduce");
    case Step::Kind::kReduce:
      return finish(
          api.Reduce(from, to, step.count, step.type, step.op, step.peer, comm, stream),
          "ncclReduce");
    case Step::Kind::kReduceScatter:
      return finish(
          api.ReduceScatter(from, to, step.count, step.type, step.op, comm, stream),
          "ncclReduceScatter");
    case Step::Kind::kAllGather:
      return finish(api.AllGather(from, to, step.count, step.type, comm, stream),
                    "ncclAllGather");
    case Step::Kind::kAllToAll:
      return finish(api.AlltoAll(from, to, step.count, step.type, comm, stream),
                    "ncclAlltoAll");
    case Step::Kind::kBroadcast:
      return finish(
          api.Broadcast(from, to, step.count, step.type, step.peer, comm, stream),
          "ncclBroadcast");
    case Step::Kind::kGather:
      return finish(
          api.Gather(from, to, step.count, step.type, step.peer, comm, stream),
          "ncclGather");
    case Step::Kind::kScatter:
      return finish(
          api.Scatter(from, to, step.count, step.type, step.peer, comm, stream),
          "ncclScatter");
  }
  return OkStatus();
}

}  // namespace

Status RunLocalStep(const NcclLibrary& library, const Step& step,
                    const void* const* operands, void* const* results,
                    cuda::Stream stream) {
  const char* from = static_cast<const char*>(operands[step.leaf]) + step.from;
  char* to = static_cast<char*>(results[step.leaf]) + step.to;
  if (step.kind == Step::Kind::kZero) {
    return library.Check(library.cuda.MemsetD8Async(reinterpret_cast<cuda::Pointer>(to),
                                                    0, step.count, stream),
                         "cuMemsetD8Async");
  }
  if (from == to) return OkStatus();
  return library.Check(library.cuda.MemcpyDtoDAsync(
                           reinterpret_cast<cuda::Pointer>(to),
                           reinterpret_cast<cuda::Pointer>(from), step.count, stream),
                       "cuMemcpyDtoDAsync");
}

Status RunSteps(const NcclLibrary& library, const Steps& steps, const Call& call,
                nccl::Comm comm, cuda::Stream stream, const FinishCall& finish) {
  const auto run = [&](const Step& step) {
    return RunStep(library, step, call, comm, stream, finish);
  };
  Status status = OkStatus();
  for (const Step& step : steps.local) {
    if (status.success()) status = run(step);
  }
  if (status.failure() || steps.grouped.empty()) return status;
  if (steps.grouped.size() == 1) return run(steps.grouped[0]);
  RETURN_IF_ERROR(library.Check(library.nccl.GroupStart(), "ncclGroupStart"));
  for (const Step& step : steps.grouped) {
    if (status.success()) status = run(step);
  }
  Status ended = finish(library.nccl.GroupEnd(), "ncclGroupEnd");
  return status.failure() ? status : ended;
}

}  // namespace jaxcomm
