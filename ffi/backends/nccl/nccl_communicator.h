// Communicators of NVIDIA GPUs.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_

#include <memory>

#include "ffi/backends/nccl/world.h"
#include "ffi/communicator.h"

namespace jaxcomm {

struct NcclSpec {
  std::shared_ptr<NcclWorld> world;
  NcclSettings settings;
  NcclPatience patience;
};

// Makes the communicator with the other processes, connects its ranks and waits for
// all of them. Groups of one get no communicator of NCCL's.
Status MakeNcclCommunicator(CommunicatorSpec spec, NcclSpec how,
                            std::shared_ptr<Communicator>* communicator);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_
