// Gives streams the steps of steps.h.
#include <utility>

#include "ffi/backends/nccl/plans/steps.h"

namespace jaxcomm {
namespace {

using Kind = Step::Kind;

const char* FromOf(const Step& step, const void* const* operands,
                   void* const* results) {
  const void* of = step.from_room < 0 ? operands[step.leaf] : results[step.from_room];
  return static_cast<const char*>(of) + step.from;
}

char* ToOf(const Step& step, void* const* results) {
  return static_cast<char*>(results[step.to_room < 0 ? step.leaf : step.to_room]) +
         step.to;
}

Status RunStep(const NcclLibrary& library, const Step& step, const Call& call,
               nccl::Comm comm, cuda::Stream stream, const FinishCall& finish) {
  const char* from = FromOf(step, call.operands, call.results);
  char* to = ToOf(step, call.results);
  const nccl::Api& api = library.nccl;
  const auto run = [&](const auto& function, auto... arguments) {
    return finish(function(arguments..., comm, stream), function.name);
  };
  switch (step.kind) {
    case Kind::kCopy:
    case Kind::kZero:
      return RunLocalStep(library, step, call.operands, call.results, stream);
    case Kind::kSend:
      return run(api.Send, from, step.count, step.type, step.peer);
    case Kind::kRecv:
      return run(api.Recv, to, step.count, step.type, step.peer);
    case Kind::kAllReduce:
      return run(api.AllReduce, from, to, step.count, step.type, step.op);
    case Kind::kReduce:
      return run(api.Reduce, from, to, step.count, step.type, step.op, step.peer);
    case Kind::kReduceScatter:
      return run(api.ReduceScatter, from, to, step.count, step.type, step.op);
    case Kind::kAllGather:
      return run(api.AllGather, from, to, step.count, step.type);
    case Kind::kAllToAll:
      return run(api.AlltoAll, from, to, step.count, step.type);
    case Kind::kBroadcast:
      return run(api.Broadcast, from, to, step.count, step.type, step.peer);
    case Kind::kGather:
      return run(api.Gather, from, to, step.count, step.type, step.peer);
    case Kind::kScatter:
      return run(api.Scatter, from, to, step.count, step.type, step.peer);
  }
  return OkStatus();
}

}  // namespace

Status CopyRows(const NcclLibrary& library, const Step& step, cuda::Pointer to,
                cuda::Pointer from, cuda::Stream stream) {
  if (!step.has_gaps()) {
    return library.Try(library.cuda.MemcpyDtoDAsync, to, from,
                       static_cast<size_t>(step.bytes()), stream);
  }
  cuda::Rows rows;
  rows.from = from;
  rows.from_pitch = static_cast<size_t>(step.from_pitch);
  rows.to = to;
  rows.to_pitch = static_cast<size_t>(step.to_pitch);
  rows.row_bytes = step.count;
  rows.rows = static_cast<size_t>(step.rows);
  return library.Try(library.cuda.Memcpy2DAsync, &rows, stream);
}

Status RunLocalStep(const NcclLibrary& library, const Step& step,
                    const void* const* operands, void* const* results,
                    cuda::Stream stream) {
  const auto to = reinterpret_cast<cuda::Pointer>(ToOf(step, results));
  if (step.kind == Kind::kZero) {
    return library.Try(library.cuda.MemsetD8Async, to, 0, step.count, stream);
  }
  const auto from = reinterpret_cast<cuda::Pointer>(FromOf(step, operands, results));
  return from == to ? OkStatus() : CopyRows(library, step, to, from, stream);
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
  if (status.success() && steps.grouped.size() == 1) status = run(steps.grouped[0]);
  if (status.success() && steps.grouped.size() > 1) {
    RETURN_IF_ERROR(library.Try(library.nccl.GroupStart));
    for (const Step& step : steps.grouped) {
      if (status.success()) status = run(step);
    }
    Status ended = finish(library.nccl.GroupEnd(), "ncclGroupEnd");
    if (status.success()) status = std::move(ended);
  }
  for (const Step& step : steps.behind) {
    if (status.success()) status = run(step);
  }
  return status;
}

}  // namespace jaxcomm
