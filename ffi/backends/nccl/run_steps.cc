#include "ffi/backends/nccl/run_steps.h"

#include <atomic>

namespace jaxcomm {
namespace {

Status RunStep(const NcclLibrary& library, const Step& step, const Call& call,
               nccl::Comm comm, cuda::Stream stream, const Settle& settle) {
  const char* from = static_cast<const char*>(call.operands[step.leaf]) + step.from;
  char* to = static_cast<char*>(call.results[step.leaf]) + step.to;
  const nccl::Api& api = library.nccl;
  switch (step.kind) {
    case Step::Kind::kCopy:
    case Step::Kind::kZero:
      return RunLocalStep(library, step, call.operands, call.results, stream);
    case Step::Kind::kSend:
      return settle(api.Send(from, step.count, step.type, step.peer, comm, stream),
                    "ncclSend");
    case Step::Kind::kRecv:
      return settle(api.Recv(to, step.count, step.type, step.peer, comm, stream),
                    "ncclRecv");
    case Step::Kind::kAllReduce:
      return settle(
          api.AllReduce(from, to, step.count, step.type, step.op, comm, stream),
          "ncclAllReduce");
    case Step::Kind::kReduce:
      return settle(
          api.Reduce(from, to, step.count, step.type, step.op, step.peer, comm, stream),
          "ncclReduce");
    case Step::Kind::kReduceScatter:
      return settle(
          api.ReduceScatter(from, to, step.count, step.type, step.op, comm, stream),
          "ncclReduceScatter");
    case Step::Kind::kAllGather:
      return settle(api.AllGather(from, to, step.count, step.type, comm, stream),
                    "ncclAllGather");
    case Step::Kind::kAllToAll:
      return settle(api.AlltoAll(from, to, step.count, step.type, comm, stream),
                    "ncclAlltoAll");
    case Step::Kind::kBroadcast:
      return settle(
          api.Broadcast(from, to, step.count, step.type, step.peer, comm, stream),
          "ncclBroadcast");
    case Step::Kind::kGather:
      return settle(
          api.Gather(from, to, step.count, step.type, step.peer, comm, stream),
          "ncclGather");
    case Step::Kind::kScatter:
      return settle(
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

uint64_t NextCommunicatorNumber() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

Status FindSteps(const NcclLibrary& library, CallSite& site, uint64_t number, int size,
                 int rank, const Steps** steps) {
  Status status = OkStatus();
  const uint64_t key =
      number << 40 | static_cast<uint64_t>(rank) << 20 | static_cast<uint64_t>(size);
  const auto make = [&]() -> std::shared_ptr<const Steps> {
    Plan plan;
    auto made = std::make_shared<Steps>();
    status = site.MakePlan(size, nullptr, &plan);
    if (status.success()) {
      const nccl::Api& api = library.nccl;
      const bool has_newer =
          api.AlltoAll != nullptr && api.Gather != nullptr && api.Scatter != nullptr;
      const Natives natives = has_newer ? Natives::kOf228 : Natives::kOf218;
      status = MakeSteps(site, plan, rank, natives, made.get());
    }
    return status.success() ? made : nullptr;
  };
  *steps = site.Derived<Steps>(key, make).get();
  return status;
}

std::shared_ptr<const PeerPlan> FindPeerPlan(CallSite& site, uint64_t number,
                                             int size) {
  const uint64_t key = number << 40 | static_cast<uint64_t>(size);
  const auto make = [&]() -> std::shared_ptr<const PeerPlan> {
    Plan plan;
    // Where there is no plan, FindSteps() says why.
    if (site.MakePlan(size, nullptr, &plan).failure()) {
      return std::make_shared<PeerPlan>();
    }
    return std::make_shared<PeerPlan>(MakePeerPlan(site, plan));
  };
  return site.Derived<PeerPlan>(key, make);
}

Status RunSteps(const NcclLibrary& library, const Steps& steps, const Call& call,
                nccl::Comm comm, cuda::Stream stream, const Settle& settle) {
  const auto run = [&](const Step& step) {
    return RunStep(library, step, call, comm, stream, settle);
  };
  Status status = OkStatus();
  for (const Step& step : steps.local) {
    if (status.success()) status = run(step);
  }
  if (status.failure() || steps.grouped.empty()) return status;
  if (steps.grouped.size() == 1) return run(steps.grouped[0]);
  status = library.Check(library.nccl.GroupStart(), "ncclGroupStart");
  if (status.failure()) return status;
  for (const Step& step : steps.grouped) {
    if (status.success()) status = run(step);
  }
  Status ended = settle(library.nccl.GroupEnd(), "ncclGroupEnd");
  return status.failure() ? status : ended;
}

}  // namespace jaxcomm
