// Whether this process was forked from the one that loaded the package.
#ifndef JAXCOMM_FFI_OS_FORKED_H_
#define JAXCOMM_FFI_OS_FORKED_H_

#include <unistd.h>

namespace jaxcomm {

inline const pid_t kLoadedIn = getpid();

// A forked child has its parent's objects, but none of its threads. The descriptors and
// the shared memory belong to the parent: the child leaves them alone.
inline bool IsForked() { return getpid() != kLoadedIn; }

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_FORKED_H_
