#include "ffi/os/forked.h"

#include <pthread.h>
#include <unistd.h>

namespace jaxcomm {

namespace internal {
std::atomic<bool> is_forked{false};
}  // namespace internal

void CountForksFromNow() {
  // fork() calls it in the child. vfork() and posix_spawn() do not, and need not: such
  // a child does nothing until it becomes another program.
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { internal::is_forked = true; });
}

Status ForkedError(std::string_view what) {
  return FailedPrecondition(
      what, ": process ", getpid(), " was forked from process ", getppid(),
      ", which had communicators. They are the parent's, and a child cannot use them. "
      "Start processes by multiprocessing.get_context(\"spawn\"), or by "
      "\"forkserver\"");
}

}  // namespace jaxcomm
