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
ErrorOr<std::thread> StartThread(Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    return Status(ErrorCode::kResourceExhausted,
                  StrCat("cannot start a thread: ", error.code().message(),
                         ". Allow this process more threads or memory; see ulimit -u, "
                         "ulimit -v and the cgroup's pids.max"));
  }
}

// Starts a thread that nobody joins.
template <typename Body>
Status StartDetached(Body body) {
  ASSIGN_OR_RETURN(std::thread thread, StartThread(std::move(body)));
  thread.detach();
  return OkStatus();
}

// A thread that runs as long as the process. The owner is never destroyed, and has a
// lock.
class BackgroundThread {
 public:
  // Starts it at the first call, and at each later one while the system refuses it.
  template <typename Body>
  Status Start(Body body) {
    if (is_started_) return OkStatus();
    RETURN_IF_ERROR(StartDetached(std::move(body)));
    is_started_ = true;
    return OkStatus();
  }

 private:
  bool is_started_ = false;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_START_THREAD_H_
