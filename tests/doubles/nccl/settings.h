// What the environment says (see controls.h), and ncclConfig_t as far as the pretended
// version knows it.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_SETTINGS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_SETTINGS_H_

#include <cstdint>
#include <cstdlib>
#include <string>

#include "ffi/backends/nccl/library/nccl_api.h"

namespace jaxcomm::fake {

inline int64_t Setting(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::atoll(text);
}
inline constexpr int kDevices = 8;  // of a process
inline constexpr int64_t kDeviceBytes = int64_t{16} << 30;
inline int NcclVersion() {
  return static_cast<int>(Setting("JAXCOMM_FAKE_NCCL_VERSION", 23203));
}
inline bool RunsSumKernels() { return Setting("JAXCOMM_FAKE_KERNELS", 0) == 1; }
inline bool MultiRankGpu() {
  return NcclVersion() >= 23003 && Setting("NCCL_MULTI_RANK_GPU_ENABLE", 0) == 1;
}

// Checks `config`, which may be null, and copies what it says over `*out`, whose unset
// fields keep NCCL's defaults. A version that is older than a field hides it.
nccl::Result ReadConfig(const nccl::Config* config, nccl::Config* out);

// A JSON member with the fields that are set, for the trace; empty without any. Does
// not read further than `size` says.
std::string Describe(const nccl::Config* config);

inline bool IsBlocking(const nccl::Config& config) { return config.blocking != 0; }
inline bool SharesOnSplit(const nccl::Config& config) {
  return config.split_share == 1;
}

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_SETTINGS_H_
