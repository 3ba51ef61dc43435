#include "ffi/backends/nccl/plans/engine_choice.h"

namespace jaxcomm {
namespace {

EngineChoice Nccl(const char* reason) { return {EngineKind::kNccl, reason}; }

EngineChoice ChooseForMoves(const CallFacts& call, const EnginePolicy& policy,
                            const EngineTopology& topology) {
  if (!policy.copy_engines) return Nccl("the policy rules out copy engines");
  if (!topology.can_copy) {
    return Nccl(
        "not all ranks are of one process whose GPUs reach each other's memory");
  }
  if (!IsWorthCopying(call.bytes_sent, 0, call.is_start)) {
    return Nccl(call.is_start ? "no rank sends 4 MiB" : "no rank sends 32 MiB");
  }
  if (!IsWorthCopying(call.bytes_sent, call.copies, call.is_start)) {
    return Nccl("copies of less than 1 MiB on average");
  }
  // NCCL has kernels of its own for symmetric memory, but none that send along pairs.
  if (call.is_symmetric && !call.moves_along_pairs) {
    return Nccl("all buffers lie in symmetric memory, for which NCCL has kernels");
  }
  return {EngineKind::kCopy, "a large collective that only moves bytes"};
}

EngineChoice ChooseForSums(const CallFacts& call, const EnginePolicy& policy,
                           const EngineTopology& topology) {
  if (!policy.one_shot) return Nccl("the policy rules out the kernel of small sums");
  if (!topology.can_add) return Nccl("not all ranks can take part in small sums");
  if (call.sums > kMostSums) return Nccl("sums of more than 4 arrays");
  if (call.words_of_largest_sum > MostWordsOfSum(call.size)) {
    return Nccl(
        "a sum of more bytes than an inbox takes: 1 MiB on two ranks, else 512 KiB "
        "divided by the ranks");
  }
  if (topology.sums_left < kMostSums) return Nccl("all numbers of sums are used up");
  return {EngineKind::kOneShot, "a small sum"};
}

}  // namespace

const char* EngineName(EngineKind kind) {
  constexpr const char* kNames[] = {"nccl", "copy", "one_shot"};
  return kNames[static_cast<int>(kind)];
}

EngineChoice Choose(const CallFacts& call, const EnginePolicy& policy,
                    const EngineTopology& topology) {
  if (call.size < 2) return Nccl("a group of one rank");
  // Ranks agree on copies, and sums get their numbers, when a call is launched.
  if (call.may_be_captured) return Nccl("a CUDA graph may record it");
  if (call.only_moves) return ChooseForMoves(call, policy, topology);
  if (call.sums > 0) return ChooseForSums(call, policy, topology);
  return Nccl("neither moves alone nor sums that our kernel adds");
}

}  // namespace jaxcomm
