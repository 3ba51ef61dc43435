// What a version of NCCL knows of ncclConfig_t. As unkind as the
// real thing: a field that an old version does not know is refused or ignored there.
#include "tests/doubles/nccl/settings.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/failed.h"

namespace jaxcomm::fake {
namespace {

// sizeof(ncclConfig_t) in each version's header.
size_t KnownBytes(int version) {
  if (version < 22700) return 48;
  if (version < 22800) return 72;
  if (version < 22900) return 80;
  if (version < 23000) return 88;
  if (version < 23100) return 96;
  return version < 23200 ? 112 : 120;
}

// Those that have bounds.
struct Field {
  const char* name;
  int nccl::Config::* value;
  int least = INT_MIN, most = INT_MAX;
};

constexpr Field kFields[] = {
    {"blocking", &nccl::Config::blocking, 0, 1},
    {"cga_cluster_size", &nccl::Config::cga_cluster_size, 0, 8},
    {"min_ctas", &nccl::Config::min_ctas, 1, 64},
    {"max_ctas", &nccl::Config::max_ctas, 1, 64},
    {"split_share", &nccl::Config::split_share, 0, 1},
    {"traffic_class", &nccl::Config::traffic_class, 0, 255},
    {"collnet_enable", &nccl::Config::collnet_enable, 0, 1},
    {"cta_policy", &nccl::Config::cta_policy, 0, 3},
    {"max_p2p_peers", &nccl::Config::max_p2p_peers, 1},
};

nccl::Result Check(const nccl::Config& config) {
  for (const Field& field : kFields) {
    const int value = config.*field.value;
    if (value == nccl::kUndefined || (value >= field.least && value <= field.most)) {
      continue;
    }
    return Failure(nccl::kInvalidArgument, std::string("Invalid config ") + field.name +
                                               " " + std::to_string(value));
  }
  if (config.min_ctas != nccl::kUndefined && config.max_ctas != nccl::kUndefined &&
      config.min_ctas > config.max_ctas) {
    return Failure(nccl::kInvalidArgument, "Invalid config min_ctas above max_ctas");
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
  const auto add = [&out](const char* name, const std::string& value) {
    out += std::string(out.empty() ? "\"" : ", \"") + name + "\": " + value;
  };
  for (const Field& field : kFields) {
    const int value = set.*field.value;
    if (value != nccl::kUndefined) add(field.name, std::to_string(value));
  }
  if (set.comm_name != nullptr) {
    add("comm_name", std::string("\"") + set.comm_name + "\"");
  }
  return out.empty() ? out : "\"config\": {" + out + "}";
}

}  // namespace jaxcomm::fake

jaxcomm::nccl::Result jaxcomm::nccl::ncclGetVersion(int* version) {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclGetVersion");
  if (version == nullptr) return fake::Failure(kInvalidArgument, "version is null");
  *version = fake::NcclVersion();
  return kSuccess;
}
