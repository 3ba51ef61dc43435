// Ranks of one process whose devices reach each other's memory.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PEER_ACCESS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PEER_ACCESS_H_

#include <vector>

#include "ffi/backends/nccl/library.h"

namespace jaxcomm {

struct PeerMember {
  int group = 0, rank = 0, size = 0;
  int ordinal = 0;
  cuda::Context context = nullptr;
};

// Whether every device reaches the memory of the others of its group; from now on, if
// they can.
bool CanReachPeers(const NcclLibrary& library, const std::vector<PeerMember>& members);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PEER_ACCESS_H_
