#include "tests/doubles/nccl/config.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>

#include "tests/doubles/nccl/errors.h"
#include "tests/doubles/nccl/settings.h"

namespace jaxcomm::fake {
namespace {

// sizeof(ncclConfig_t) in each version's header.
size_t KnownBytes(int version) {
  if (version < 22700) return 48;
  if (version < 22800) return 72;
  if (version < 22900) return 80;
  if (version < 23000) return 88;
  if (version < 23100) return 96;
  if (version < 23200) return 112;
  return 120;
}

nccl::Result Check(const char* name, int value, int least, int most) {
  if (value == nccl::kUndefined || (value >= least && value <= most)) {
    return nccl::kSuccess;
  }
  return Failure(nccl::kInvalidArgument,
                 std::string("Invalid config ") + name + " " + std::to_string(value));
}

nccl::Result Check(const nccl::Config& config) {
  constexpr int kMaxClusterSize = 8;
  constexpr int kMaxCtas = 64;
  const nccl::Result results[] = {
      Check("blocking", config.blocking, 0, 1),
      Check("cgaClusterSize", config.cga_cluster_size, 0, kMaxClusterSize),
      Check("minCTAs", config.min_ctas, 1, kMaxCtas),
      Check("maxCTAs", config.max_ctas, 1, kMaxCtas),
      Check("splitShare", config.split_share, 0, 1),
      Check("trafficClass", config.traffic_class, 0, 255),
      Check("collnetEnable", config.collnet_enable, 0, 1),
      Check("CTAPolicy", config.cta_policy, 0, 3),
      Check("shrinkShare", config.shrink_share, 0, 1),
      Check("maxP2pPeers", config.max_p2p_peers, 1, INT_MAX),
  };
  for (const nccl::Result result : results) {
    if (result != nccl::kSuccess) return result;
  }
  if (config.min_ctas != nccl::kUndefined && config.max_ctas != nccl::kUndefined &&
      config.min_ctas > config.max_ctas) {
    return Failure(nccl::kInvalidArgument, "Invalid config minCTAs above maxCTAs");
  }
  return nccl::kSuccess;
}

// The caller's fields, and unset ones where its struct ends.
nccl::Config Copy(const nccl::Config* config) {
  nccl::Config copy{};
  std::memcpy(static_cast<void*>(&copy), config,
              std::min(config->size, sizeof(nccl::Config)));
  return copy;
}

}  // namespace

nccl::Result ReadConfig(const nccl::Config* config, nccl::Config* out) {
  if (config == nullptr) return nccl::kSuccess;
  if (config->magic != nccl::Config{}.magic) {
    return Failure(nccl::kInvalidArgument,
                   "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  }
  const size_t known = KnownBytes(NcclVersion());
  if (config->size > known) {
    return Failure(nccl::kInvalidArgument,
                   "ncclConfig_t has size " + std::to_string(config->size) +
                       ", version " + std::to_string(NcclVersion()) + " knows " +
                       std::to_string(known));
  }
  nccl::Config read = Copy(config);
  if (read.version < 21400) read.blocking = nccl::kUndefined;
  if (read.version < 21700) {
    read.cga_cluster_size = read.min_ctas = read.max_ctas = nccl::kUndefined;
    read.net_name = nullptr;
  }
  if (read.version < 21800) read.split_share = nccl::kUndefined;
  const nccl::Result result = Check(read);
  if (result == nccl::kSuccess) *out = read;
  return result;
}

std::string Describe(const nccl::Config* config) {
  if (config == nullptr || config->size < offsetof(nccl::Config, blocking)) return "";
  const nccl::Config set = Copy(config);
  std::string out;
  const auto add = [&out](const char* name, int value) {
    if (value == nccl::kUndefined) return;
    out += std::string(out.empty() ? "\"" : ", \"") + name +
           "\": " + std::to_string(value);
  };
  add("blocking", set.blocking);
  add("cga_cluster_size", set.cga_cluster_size);
  add("min_ctas", set.min_ctas);
  add("max_ctas", set.max_ctas);
  add("split_share", set.split_share);
  add("traffic_class", set.traffic_class);
  add("collnet_enable", set.collnet_enable);
  add("cta_policy", set.cta_policy);
  add("shrink_share", set.shrink_share);
  add("nvls_ctas", set.nvls_ctas);
  add("channels_per_net_peer", set.channels_per_net_peer);
  add("nvlink_centric_sched", set.nvlink_centric_sched);
  add("graph_usage_mode", set.graph_usage_mode);
  add("num_rma_ctx", set.num_rma_ctx);
  add("max_p2p_peers", set.max_p2p_peers);
  add("graph_stream_ordering", set.graph_stream_ordering);
  if (set.comm_name != nullptr) {
    out += std::string(out.empty() ? "" : ", ") + "\"comm_name\": \"" + set.comm_name +
           "\"";
  }
  return out.empty() ? out : "\"config\": {" + out + "}";
}

}  // namespace jaxcomm::fake
