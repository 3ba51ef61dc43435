#include "ffi/backends/nccl/engines/data_dependent.h"

#include <limits>
#include <utility>
#include <vector>

namespace jaxcomm {
namespace {

// What an operand takes in the exchange: the next one is aligned for any integer.
size_t BytesOf(const Leaf& leaf) {
  return (static_cast<size_t>(leaf.bytes()) + 7) & ~size_t{7};
}

size_t BytesOf(const CallSite& site) {
  size_t bytes = 0;
  for (size_t i = site.plan_reads_operands_from(); i < site.operands().size(); ++i) {
    bytes += BytesOf(site.operands()[i]);
  }
  return bytes;
}

// A program may come from elsewhere: the lowering makes no such calls.
Status CheckSize(const CallSite& site, const RankFacts& rank) {
  if (rank.size < 2) {
    return InvalidArgument(site.description(),
                           ": a group has one rank; use groups of one size");
  }
  if (BytesOf(site) <= DataDependent::kMostBytes) return OkStatus();
  return InvalidArgument(site.description(), ": its offsets and sizes have ",
                         BytesOf(site), " bytes, and at most ",
                         DataDependent::kMostBytes, " are read. Send fewer slices");
}

}  // namespace

ErrorOr<std::unique_ptr<DataDependent>> DataDependent::Create(
    NcclParts& parts, NcclEngine& nccl, const EnginePolicy& policy,
    std::unique_ptr<PeerMemory> arenas) {
  std::unique_ptr<DataDependent> made(new DataDependent(parts, nccl));
  if (policy.device_sizes) {
    RETURN_IF_ERROR(made->Prepare());
    ASSIGN_OR_RETURN(made->device_sized_,
                     DeviceSized::Create(parts, *made->numbers_, policy.window_bytes,
                                         std::move(arenas)));
    parts.health.Add(*made->device_sized_);
  }
  return made;
}

Status DataDependent::Enqueue(const Call& call, LocalRank& rank, cuda::Stream stream) {
  if (Status refusal = CheckSize(*call.site, rank.facts); refusal.failure()) {
    rank.queue.Refuse(call);
    return refusal;
  }
  MutexLock lock(calling_[rank.facts.place]);
  if (device_sized_ != nullptr && device_sized_->Takes(*call.site, rank.facts)) {
    return device_sized_->Enqueue(call, rank, stream);
  }
  const LaunchQueue::Counted counted(rank.queue.waiting);
  RETURN_IF_ERROR(rank.queue.Give(call, stream, rank.queue.Record(call),
                                  [&] { return GiveNumbers(call, rank, stream); }));
  RETURN_IF_ERROR(Wait(call, rank, stream));
  const ErrorOr<Steps> steps = MakeStepsOf(call, rank);
  if (steps.has_error()) {
    rank.queue.Refuse(call);
    return steps.error();
  }
  RETURN_IF_ERROR(rank.queue.Give(call, stream, rank.queue.Record(call), [&] {
    return nccl_.Run(*steps, call, rank, stream);
  }));
  rank.queue.counts().Add(*call.site);
  return OkStatus();
}

Status DataDependent::GiveNumbers(const Call& call, LocalRank& rank,
                                  cuda::Stream stream) {
  RETURN_IF_ERROR(Prepare());
  if (device_sized_ != nullptr) {
    RETURN_IF_ERROR(device_sized_->KeepOrder(rank.facts.place, stream));
  }
  const std::vector<Leaf>& leaves = call.site->operands();
  cuda::Pointer to = numbers_->own_on_device(rank.facts.place);
  for (size_t i = call.site->plan_reads_operands_from(); i < leaves.size(); ++i) {
    RETURN_IF_ERROR(
        parts_.library.Try(parts_.library.cuda.MemcpyDtoDAsync, to,
                           reinterpret_cast<cuda::Pointer>(call.operands[i]),
                           static_cast<size_t>(leaves[i].bytes()), stream));
    to += BytesOf(leaves[i]);
  }
  rank.queue.MayWait();
  return numbers_->Give(rank, BytesOf(*call.site), stream);
}

Status DataDependent::Wait(const Call& call, const LocalRank& rank,
                           cuda::Stream stream) {
  CurrentContext current(parts_.library.cuda, rank.facts.context);
  constexpr double kForever = std::numeric_limits<double>::infinity();
  const Status status =
      WaitForStream(parts_.library, stream, parts_.health.WhileWell({kForever}),
                    "waiting for offsets and sizes");
  return status.success() ? status : parts_.health.FailCall(call, rank.facts, status);
}

ErrorOr<Steps> DataDependent::MakeStepsOf(const Call& call,
                                          const LocalRank& rank) const {
  const std::vector<Leaf>& leaves = call.site->operands();
  std::vector<std::vector<const void*>> operands;
  std::vector<const void* const*> operands_of;
  for (int sender = 0; sender < rank.facts.size; ++sender) {
    const auto* data = static_cast<const char*>(
        numbers_->sent_by(sender, rank.facts.place, BytesOf(*call.site)));
    auto& of_sender = operands.emplace_back(leaves.size());
    for (size_t i = call.site->plan_reads_operands_from(); i < leaves.size(); ++i) {
      of_sender[i] = data;
      data += BytesOf(leaves[i]);
    }
  }
  for (const auto& of_sender : operands) operands_of.push_back(of_sender.data());
  ASSIGN_OR_RETURN(const Plan plan,
                   call.site->MakePlan(rank.facts.size, operands_of.data()));
  return MakeSteps(*call.site, plan, rank.facts.rank, Natives::kNone);
}

}  // namespace jaxcomm
