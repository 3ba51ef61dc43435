#ifndef JAXCOMM_FFI_CORES_H_
#define JAXCOMM_FFI_CORES_H_

#include <algorithm>
#include <thread>

namespace jaxcomm {

// The processors of this machine, asked for once: the system takes longer to answer
// than a small collective takes.
inline int Cores() {
  static const int cores =
      std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return cores;
}

// Lets the core rest between two looks at a flag.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORES_H_
