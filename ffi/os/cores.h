#ifndef JAXCOMM_FFI_OS_CORES_H_
#define JAXCOMM_FFI_OS_CORES_H_

#include <string>
#include <thread>

namespace jaxcomm {

// The number of cores that this process may keep busy: the processors that it may run
// on, or fewer if its container has a quota of their time. Read once: the system takes
// longer to answer than a small collective takes.
int Cores();

// How many cores the cgroups of this process allow it; infinity if they set no limit.
// Tests prepend `root` to the paths of Linux.
double CpuQuota(const std::string& root = "");

// How many of the processors to keep busy under a quota: at least one.
int UsableCores(int processors, double quota);

// Rests the core between two looks at a flag.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_CORES_H_
