// The identity of a rank of this process: plain data that never changes.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_RANK_FACTS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_RANK_FACTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/nccl/library/cuda_api.h"
#include "ffi/base/status.h"

namespace jaxcomm {

// One device of this process.
struct NcclDevice {
  int64_t id = 0;   // global, as JAX numbers it
  int ordinal = 0;  // local, as CUDA numbers it
  int rank = 0;     // in the world
};

struct RankFacts {
  int group = 0, rank = 0, size = 0;  // size 0: in no group
  int ordinal = 0;                    // of its device, as CUDA numbers it
  cuda::Context context = nullptr;
  size_t place = 0;    // among the ranks of this process
  int64_t device = 0;  // global id

  // "rank 0 of 2 (device 100)"
  std::string ToString() const {
    return StrCat("rank ", rank, " of ", size, " (device ", device, ")");
  }
};

struct LocalRank;
// The ranks of this process, by place.
using LocalRanks = std::vector<std::unique_ptr<LocalRank>>;

// Finds a device in the groups of a communicator.
inline RankFacts FindRank(const std::vector<std::vector<int64_t>>& groups,
                          int64_t device) {
  RankFacts facts;
  facts.device = device;
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto found = std::find(groups[group].begin(), groups[group].end(), device);
    if (found == groups[group].end()) continue;
    facts.group = static_cast<int>(group);
    facts.rank = static_cast<int>(found - groups[group].begin());
    facts.size = static_cast<int>(groups[group].size());
  }
  return facts;
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_RANK_FACTS_H_
