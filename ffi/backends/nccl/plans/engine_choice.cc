#include "ffi/backends/nccl/plans/engine_choice.h"

#include <algorithm>

namespace jaxcomm {
namespace {

bool IsCopied(const CallFacts& call, const EnginePolicy& policy,
              const EngineTopology& topology) {
  return policy.copy_engines && topology.can_copy &&
         IsWorthCopying(call.bytes_sent, call.copies, call.is_start) &&
         // NCCL has kernels of its own for symmetric memory, but none that send along
         // pairs.
         (!call.is_symmetric || call.moves_along_pairs);
}

bool IsMapped(const CallFacts& call, const EnginePolicy& policy,
              const EngineTopology& topology) {
  return policy.copy_engines && topology.can_map && call.moves_along_pairs &&
         call.bytes_sent >=
             std::max(kLeastMappedBytes, call.copies * kLeastBytesOfCopy) &&
         (call.is_start || call.bytes_sent <= kMostMappedBytes);
}

bool IsOneShot(const CallFacts& call, const EnginePolicy& policy,
               const EngineTopology& topology) {
  return policy.one_shot && topology.can_add && call.sums <= kMostSums &&
         call.words_of_largest_sum <= MostWordsOfSum(call.size) &&
         topology.sums_left >= kMostSums;
}

}  // namespace

EngineKind Choose(const CallFacts& call, const EnginePolicy& policy,
                  const EngineTopology& topology) {
  // Ranks agree on copies, and sums get their numbers, when a call is launched: not
  // when a CUDA graph is, which recorded it.
  if (call.size < 2 || call.may_be_captured) return EngineKind::kNccl;
  if (call.copies_serve) {
    if (IsCopied(call, policy, topology)) return EngineKind::kCopy;
    return IsMapped(call, policy, topology) ? EngineKind::kMapped : EngineKind::kNccl;
  }
  const bool is_sum = call.sums > 0 && IsOneShot(call, policy, topology);
  return is_sum ? EngineKind::kOneShot : EngineKind::kNccl;
}

}  // namespace jaxcomm
