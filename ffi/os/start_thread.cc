#include "ffi/os/start_thread.h"

#include <fenv.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <set>

#include "ffi/os/mutex.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxcomm {
namespace {

// Never destroyed: threads may end after everything else.
Mutex& mutex = *new Mutex;
std::set<int64_t>& threads GUARDED_BY(mutex) = *new std::set<int64_t>;

// As XLA:CPU does around each program, and in each thread of its pools.
void SetArithmetic() {
  fesetenv(FE_DFL_ENV);  // rounds to nearest
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // flush to zero, denormals are zero
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  control |= uint64_t{1} << 24;  // FZ: both
  asm volatile("msr fpcr, %0" : : "r"(control));
#endif
}

}  // namespace

bool IsThreadOfOurs(int64_t thread) {
  MutexLock lock(mutex);
  return threads.count(thread) != 0;
}

namespace internal {

SignalsBlocked::SignalsBlocked() {
  sigset_t blocked;
  sigfillset(&blocked);
  // But those that a thread raises by what it does, and a profiler's.
  for (const int signal :
       {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF}) {
    sigdelset(&blocked, signal);
  }
  pthread_sigmask(SIG_BLOCK, &blocked, &before_);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

ThreadOfOurs::ThreadOfOurs(const char* name) {
  pthread_setname_np(pthread_self(), name);
  SetArithmetic();
  MutexLock lock(mutex);
  threads.insert(syscall(SYS_gettid));
}

ThreadOfOurs::~ThreadOfOurs() {
  MutexLock lock(mutex);
  threads.erase(syscall(SYS_gettid));
}

}  // namespace internal
}  // namespace jaxcomm
