// ncclConfig_t, as far as the pretended version knows it.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_CONFIG_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_CONFIG_H_

#include <string>

#include "ffi/backends/nccl/nccl_api.h"

namespace jaxcomm::fake {

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

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_CONFIG_H_
