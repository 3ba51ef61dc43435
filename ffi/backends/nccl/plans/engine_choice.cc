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
  return policy.one_shot && topology.has_kernels && call.works > 0 &&
         call.works <= kMostWorks && topology.works_left >= kMostWorks &&
         // Blocks that wait would keep their places from the work beside them.
         !(call.is_start && call.is_staged);
}

}  // namespace

EngineKind Choose(const CallFacts& call, const EnginePolicy& policy,
                  const EngineTopology& topology) {
  // Ranks agree on copies, and work gets its numbers, when a call is launched: not when
  // a CUDA graph is, which recorded it.
  if (call.size < 2 || call.may_be_captured) return EngineKind::kNccl;
  if (call.copies_serve && IsCopied(call, policy, topology)) return EngineKind::kCopy;
  if (call.copies_serve && IsMapped(call, policy, topology)) return EngineKind::kMapped;
  return IsOneShot(call, policy, topology) ? EngineKind::kOneShot : EngineKind::kNccl;
}

}  // namespace jaxcomm
