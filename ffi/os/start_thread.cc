#include "ffi/os/start_thread.h"

#include <fenv.h>
#include <pthread.h>

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxcomm::internal {
namespace {

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

void BecomeThreadOfOurs(const char* name) {
  pthread_setname_np(pthread_self(), name);
  SetArithmetic();
}

}  // namespace jaxcomm::internal
