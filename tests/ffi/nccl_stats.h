#ifndef JAXCOMM_TESTS_FFI_NCCL_STATS_H_
#define JAXCOMM_TESTS_FFI_NCCL_STATS_H_

#include "ffi/backends/nccl/nccl_communicator.h"

namespace jaxcomm::testing {

// Requires that the communicator is one of NCCL's.
inline NcclStats NcclStatsOf(const Communicator& communicator) {
  return dynamic_cast<const NcclCommunicator&>(communicator).nccl_stats();
}

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_NCCL_STATS_H_
