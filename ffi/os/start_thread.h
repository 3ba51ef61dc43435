// Starting a thread where the system may refuse one.
#ifndef JAXCOMM_FFI_OS_START_THREAD_H_
#define JAXCOMM_FFI_OS_START_THREAD_H_

#include <system_error>
#include <thread>
#include <utility>

#include "ffi/base/status.h"

namespace jaxcomm {

// Starts a thread. Returns a refusal as a value: std::thread throws, and XLA's frames
// above us pass no exception.
template <typename Body>
Status StartThread(Body body, std::thread* thread) {
  try {
    *thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    return Status(ErrorCode::kResourceExhausted,
                  StrCat("cannot start a thread: ", error.code().message(),
                         ". Allow this process more threads or memory; see ulimit -u, "
                         "ulimit -v and the cgroup's pids.max"));
  }
  return OkStatus();
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_START_THREAD_H_
