// Calls of NCCL that wait for other processes, which may never come.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_PATIENCE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_PATIENCE_H_

#include <functional>
#include <memory>
#include <string>

#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/base/status.h"

namespace jaxcomm {

class Health;

// Runs call() on a thread of its own, and waits for its end. What ends the wait earlier
// ends the communicator. `owner` keeps the communicator as long as the thread runs.
Status RunPatiently(Health& health, std::shared_ptr<void> owner,
                    const std::string& what, const NcclPatience& patience,
                    std::function<Status()> call);

// Runs call() on this thread. The end of the communicator lets it go once the wait is
// over. Ctrl-C is seen only where call() looks for it.
Status RunGuarded(Health& health, const std::string& what, const NcclPatience& patience,
                  const std::function<Status()>& call);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_PATIENCE_H_
