#include "ffi/backends/nccl/library/settings.h"

#include <cstddef>

namespace jaxcomm {
namespace {

struct Field {
  const char* name;
  int nccl::Config::* member;
  int since;
};

constexpr Field kFields[] = {
    {"blocking", &nccl::Config::blocking, 21400},
    {"cgaClusterSize", &nccl::Config::cga_cluster_size, 21700},
    {"minCTAs", &nccl::Config::min_ctas, 21700},
    {"maxCTAs", &nccl::Config::max_ctas, 21700},
    {"splitShare", &nccl::Config::split_share, 21800},
    {"trafficClass", &nccl::Config::traffic_class, 22700},
    {"collnetEnable", &nccl::Config::collnet_enable, 22700},
    {"CTAPolicy", &nccl::Config::cta_policy, 22700},
    {"nvlsCTAs", &nccl::Config::nvls_ctas, 22700},
    {"nChannelsPerNetPeer", &nccl::Config::channels_per_net_peer, 22800},
    {"nvlinkCentricSched", &nccl::Config::nvlink_centric_sched, 22800},
    {"graphUsageMode", &nccl::Config::graph_usage_mode, 22900},
    {"numRmaCtx", &nccl::Config::num_rma_ctx, 22900},
    {"maxP2pPeers", &nccl::Config::max_p2p_peers, 23003},
    {"graphStreamOrdering", &nccl::Config::graph_stream_ordering, 23007},
};

constexpr int kFirstWithName = 22700;

// Length and version of the layout that a library knows. Newer ones accept older.
struct Layout {
  int since;
  size_t size;
};

constexpr Layout kLayouts[] = {
    {23007, sizeof(nccl::Config)},
    {23003, sizeof(nccl::Config)},
    {22900, offsetof(nccl::Config, max_p2p_peers)},
    {22800, offsetof(nccl::Config, graph_usage_mode)},
    {22700, offsetof(nccl::Config, channels_per_net_peer)},
    {0, offsetof(nccl::Config, comm_name)},
};

}  // namespace

bool NcclSettings::shares() const {
  const auto found = numbers.find("splitShare");
  return found != numbers.end() && found->second == 1;
}

nccl::Config NcclSettings::ConfigFor(const NcclLibrary& library) const {
  nccl::Config config;
  for (const Layout& layout : kLayouts) {
    if (library.version < layout.since) continue;
    config.size = layout.size;
    config.version = static_cast<unsigned>(layout.since == 0 ? 21800 : layout.since);
    break;
  }
  for (const Field& field : kFields) {
    const auto found = numbers.find(field.name);
    if (found != numbers.end()) config.*field.member = found->second;
  }
  if (!name.empty()) {
    config.comm_name = name.c_str();
  } else if (library.version >= kFirstWithName) {
    config.comm_name = "jaxcomm";  // ffi/watch leaves these out
  }
  return config;
}

std::string NcclSettings::Unknown(const NcclLibrary& library) const {
  for (const auto& [given, value] : numbers) {
    bool known = false;
    for (const Field& field : kFields) {
      known = known || (given == field.name && library.version >= field.since);
    }
    if (!known) return given;
  }
  return !name.empty() && library.version < kFirstWithName ? "commName" : "";
}

}  // namespace jaxcomm
