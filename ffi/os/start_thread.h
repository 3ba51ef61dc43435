// Starting a thread where the system may refuse one.
#ifndef JAXCOMM_FFI_OS_START_THREAD_H_
#define JAXCOMM_FFI_OS_START_THREAD_H_

#include <signal.h>

#include <cstdint>
#include <system_error>
#include <thread>
#include <utility>

#include "ffi/base/status.h"
#include "ffi/os/forked.h"

namespace jaxcomm {

namespace internal {

// While it lives, the caller blocks the signals that our threads leave to others. A
// thread inherits that: it must not take a signal before it can block any.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// While it lives, the calling thread is one of ours: it has the name, and the
// arithmetic of XLA's threads.
class ThreadOfOurs {
 public:
  explicit ThreadOfOurs(const char* name);
  ~ThreadOfOurs();
  ThreadOfOurs(const ThreadOfOurs&) = delete;
  ThreadOfOurs& operator=(const ThreadOfOurs&) = delete;
};

}  // namespace internal

// Starts a thread, in an environment that does not depend on the caller's. Some of our
// threads run XLA's programs on and others add for them, so it is that of XLA's
// threads: subnormal numbers count as 0, and results round to nearest. It leaves the
// process's signals to other threads. Debuggers show `name`, of at most 15 characters.
// Returns a refusal as a value: std::thread throws, and XLA's frames above us pass no
// exception.
template <typename Body>
ErrorOr<std::thread> StartThread(Body body, const char* name = "jaxcomm") {
  CountForksFromNow();
  const internal::SignalsBlocked blocked;
  try {
    return std::thread([name, body = std::move(body)]() mutable {
      const internal::ThreadOfOurs thread(name);
      body();
    });
  } catch (const std::system_error& error) {
    return Status(ErrorCode::kResourceExhausted,
                  StrCat("cannot start a thread: ", error.code().message(),
                         ". Allow this process more threads or memory; see ulimit -u, "
                         "ulimit -v and the cgroup's pids.max"));
  }
}

// Whether StartThread() began the thread of this process. Its name is no proof: threads
// inherit the name of a program, which may begin like ours.
bool IsThreadOfOurs(int64_t thread);

// Starts a thread that nobody joins.
template <typename Body>
Status StartDetached(Body body, const char* name = "jaxcomm") {
  ASSIGN_OR_RETURN(std::thread thread, StartThread(std::move(body), name));
  thread.detach();
  return OkStatus();
}

// A thread that runs as long as the process. The owner is never destroyed, and has a
// lock.
class BackgroundThread {
 public:
  // Starts it at the first call, and at each later one while the system refuses it.
  template <typename Body>
  Status Start(Body body, const char* name = "jaxcomm") {
    if (is_started_) return OkStatus();
    RETURN_IF_ERROR(StartDetached(std::move(body), name));
    is_started_ = true;
    return OkStatus();
  }

 private:
  bool is_started_ = false;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_START_THREAD_H_
