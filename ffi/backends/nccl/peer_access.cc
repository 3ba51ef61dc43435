#include "ffi/backends/nccl/peer_access.h"

namespace jaxcomm {
namespace {

bool CanReach(const NcclLibrary& library, const PeerMember& from,
              const PeerMember& to) {
  int can = 0;
  if (library.cuda.DeviceCanAccessPeer(&can, from.ordinal, to.ordinal) !=
          cuda::kSuccess ||
      can == 0) {
    return false;
  }
  CurrentContext current(library.cuda, from.context);
  const cuda::Result enabled = library.cuda.CtxEnablePeerAccess(to.context, 0);
  return enabled == cuda::kSuccess || enabled == cuda::kPeerAccessAlreadyEnabled;
}

}  // namespace

bool CanReachPeers(const NcclLibrary& library, const std::vector<PeerMember>& members) {
  for (const PeerMember& from : members) {
    for (const PeerMember& to : members) {
      if (to.group == from.group && to.ordinal != from.ordinal &&
          !CanReach(library, from, to)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace jaxcomm
