// Ranks of one process whose devices reach each other's memory.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PEER_ACCESS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PEER_ACCESS_H_

#include <vector>

#include "ffi/backends/nccl/library.h"
#include "ffi/backends/nccl/rank_facts.h"

namespace jaxcomm {

// Whether every device reaches the memory of the others of its group; from now on, if
// they can.
bool CanReachPeers(const NcclLibrary& library, const std::vector<RankFacts>& ranks);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PEER_ACCESS_H_
