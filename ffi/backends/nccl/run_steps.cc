#include "ffi/backends/nccl/run_steps.h"

namespace jaxcomm {
namespace {

Status RunStep(const NcclLibrary& library, const Step& step, const Call& call,
               nccl::Comm comm, cuda::Stream stream, const FinishCall& finish) {
  const char* from = static_cast<const char*>(call.operands[step.leaf]) + step.from;
  char* to = static_cast<char*>(call.results[step.leaf]) + step.to;
  const nccl::Api& api = library.nccl;
  const auto run = [&](const auto& function, auto... arguments) {
    return finish(function(arguments..., comm, stream), function.name);
  };
  switch (step.kind) {
    case Step::Kind::kCopy:
    case Step::Kind::kZero:
      return RunLocalStep(library, step, call.operands, call.results, stream);
    case Step::Kind::kSend:
      return run(api.Send, from, step.count, step.type, step.peer);
    case Step::Kind::kRecv:
      return run(api.Recv, to, step.count, step.type, step.peer);
    case Step::Kind::kAllReduce:
      return run(api.AllReduce, from, to, step.count, step.type, step.op);
    case Step::Kind::kReduce:
      return run(api.Reduce, from, to, step.count, step.type, step.op, step.peer);
    case Step::Kind::kReduceScatter:
      return run(api.ReduceScatter, from, to, step.count, step.type, step.op);
    case Step::Kind::kAllGather:
      return run(api.AllGather, from, to, step.count, step.type);
    case Step::Kind::kAllToAll:
      return run(api.AlltoAll, from, to, step.count, step.type);
    case Step::Kind::kBroadcast:
      return run(api.Broadcast, from, to, step.count, step.type, step.peer);
    case Step::Kind::kGather:
      return run(api.Gather, from, to, step.count, step.type, step.peer);
    case Step::Kind::kScatter:
      return run(api.Scatter, from, to, step.count, step.type, step.peer);
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
    return library.Try(library.cuda.MemsetD8Async, reinterpret_cast<cuda::Pointer>(to),
                       0, step.count, stream);
  }
  if (from == to) return OkStatus();
  return library.Try(library.cuda.MemcpyDtoDAsync, reinterpret_cast<cuda::Pointer>(to),
                     reinterpret_cast<cuda::Pointer>(from), step.count, stream);
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
  RETURN_IF_ERROR(library.Try(library.nccl.GroupStart));
  for (const Step& step : steps.grouped) {
    if (status.success()) status = run(step);
  }
  Status ended = finish(library.nccl.GroupEnd(), "ncclGroupEnd");
  return status.failure() ? status : ended;
}

}  // namespace jaxcomm
