#include "ffi/backends/nccl/peer_access.h"

namespace jaxcomm {
namespace {

bool CanReach(const NcclLibrary& library, const RankFacts& from, const RankFacts& to) {
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

bool CanReachPeers(const NcclLibrary& library, const std::vector<RankFacts>& ranks) {
  for (const RankFacts& from : ranks) {
    for (const RankFacts& to : ranks) {
      if (to.group == from.group && to.ordinal != from.ordinal &&
          !CanReach(library, from, to)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace jaxcomm
