#include "ffi/backends/nccl/plans/engine_choice.h"

#include <algorithm>

namespace jaxcomm {
namespace {

// Rows that NCCL would have packed. Two ranks copy them.
bool IsRowsToMany(const CallFacts& call) {
  return call.exchanges_rows && call.size > 2;
}

bool IsCopied(const CallFacts& call, const EnginePolicy& policy,
              const EngineTopology& topology) {
  // Four ranks of a process waited for each other on the host for longer than NCCL
  // took: 443 us in place of 310, on H100s. So did starts of gathers: layers with
  // documents took 590 us in place of 447, on H200s, where a rank sent 12 MiB.
  const bool is_to_many = call.size > 2 && !call.moves_along_pairs;
  if (call.is_packed_for_nccl && is_to_many) return false;
  if (is_to_many && !call.is_start && call.bytes_sent < policy.least_copied_to_many) {
    return false;
  }
  const bool gains_more = call.is_packed_for_nccl || (call.is_start && !is_to_many);
  const int64_t least = gains_more ? kLeastBytesOfMore : kLeastCopiedBytes;
  return policy.copy_engines && topology.can_copy &&
         call.bytes_sent >= std::max(least, call.copies * kLeastBytesOfCopy) &&
         // NCCL has kernels of its own for symmetric memory, but none that send along
         // pairs.
         (!call.is_symmetric || call.moves_along_pairs);
}

bool IsMapped(const CallFacts& call, const EnginePolicy& policy,
              const EngineTopology& topology) {
  if (!policy.copy_engines || !topology.can_map) return false;
  if (call.is_start && call.gathers_in_slots) {
    return call.bytes_sent >=
           std::max(kLeastBytesOfMore, call.copies * kLeastBytesOfGathered);
  }
  const bool is_worth_it =
      call.bytes_sent >= std::max(kLeastMappedBytes, call.copies * kLeastBytesOfCopy);
  const bool is_of_pairs =
      call.moves_along_pairs && (call.is_start || call.bytes_sent <= kMostMappedBytes);
  return is_worth_it && (call.is_packed_for_nccl || is_of_pairs);
}

bool IsOneShot(const CallFacts& call, const EnginePolicy& policy,
               const EngineTopology& topology) {
  // NCCL has kernels of its own for symmetric memory.
  const int64_t most = call.is_symmetric ? kMostStagedBytes : kMostExchangedBytes;
  const bool is_small =
      IsRowsToMany(call) || call.bytes_exchanged <= most * (call.size - 1);
  return policy.one_shot && topology.has_kernels && call.works > 0 &&
         call.works <= kMostWorks && topology.works_left >= kFlagsOfCall && is_small &&
         // Blocks that wait would keep their places from the work beside them.
         !(call.is_start && call.is_staged);
}

}  // namespace

EngineKind Choose(const CallFacts& call, const EnginePolicy& policy,
                  const EngineTopology& topology) {
  // Ranks agree on copies, and work gets its numbers, when a call is launched: not when
  // a CUDA graph is, which recorded it.
  if (call.size < 2 || call.may_be_captured) return EngineKind::kNccl;
  const bool is_one_shot = IsOneShot(call, policy, topology);
  if (IsRowsToMany(call) && is_one_shot) return EngineKind::kOneShot;
  if (call.copies_serve && IsCopied(call, policy, topology)) return EngineKind::kCopy;
  if (call.copies_serve && IsMapped(call, policy, topology)) return EngineKind::kMapped;
  return is_one_shot ? EngineKind::kOneShot : EngineKind::kNccl;
}

}  // namespace jaxcomm
