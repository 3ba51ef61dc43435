// One thread of this process that fails collectives past their deadline.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_WATCHDOG_H_
#define JAXCOMM_FFI_BACKENDS_HOST_WATCHDOG_H_

#include <memory>

#include "ffi/core/status.h"

namespace jaxcomm {

class LocalCommunicator;

// Watches until the communicator is gone. The thread starts with the first one. Fails
// if the system refuses the thread; the communicator's calls would wait for ever.
Status WatchDeadlines(std::weak_ptr<LocalCommunicator> communicator,
                      double timeout_seconds);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_WATCHDOG_H_
