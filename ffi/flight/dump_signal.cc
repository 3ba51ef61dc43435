#include "ffi/flight/dump_signal.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "ffi/flight/flight_dump.h"
#include "ffi/os/mutex.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

// Set before the handler is installed, then never changed.
std::atomic<int> write_end{-1};
std::atomic<pid_t> owner{0};

// Calls only what signal-safety(7) allows.
void OnSignal(int number) {
  const int problem = errno;
  if (getpid() == owner.load()) {
    // A full pipe already holds a request.
    [[maybe_unused]] const ssize_t written = write(write_end.load(), "", 1);
  } else {
    // A forked child has no thread to answer: take the default action.
    signal(number, SIG_DFL);
    sigset_t only;
    sigemptyset(&only);
    sigaddset(&only, number);
    pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
    raise(number);
  }
  errno = problem;
}

void Answer(int read_end) {
  char request;
  while (true) {
    const ssize_t got = read(read_end, &request, 1);
    if (got == 1) AnswerFlightRequest();
    if (got == 0 || (got < 0 && errno != EINTR)) return;
  }
}

bool HandledByOthers() {
  struct sigaction current;
  return sigaction(SIGUSR1, nullptr, &current) != 0 || current.sa_handler != SIG_DFL;
}

bool Install() {
  int ends[2];
  if (HandledByOthers() || pipe2(ends, O_CLOEXEC) != 0) return false;
  fcntl(ends[1], F_SETFL, O_NONBLOCK);
  // It uses nothing that is destroyed when the process ends.
  const Status started =
      StartDetached([from = ends[0]] { Answer(from); }, "jaxcomm-signal");
  if (started.failure()) {
    close(ends[0]);
    close(ends[1]);
    return false;
  }
  write_end = ends[1];
  owner = getpid();
  struct sigaction ours = {};
  ours.sa_handler = &OnSignal;
  ours.sa_flags = SA_RESTART;
  sigemptyset(&ours.sa_mask);
  return sigaction(SIGUSR1, &ours, nullptr) == 0;
}

}  // namespace

bool AnswerDumpSignal() {
  static Mutex mutex;
  static bool answers GUARDED_BY(mutex) = false;
  MutexLock lock(mutex);
  if (!answers) answers = Install();
  return answers;
}

}  // namespace jaxcomm
