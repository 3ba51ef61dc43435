// Whether this process was forked from one that had communicators.
#ifndef JAXCOMM_FFI_OS_FORKED_H_
#define JAXCOMM_FFI_OS_FORKED_H_

#include <atomic>
#include <string_view>

#include "ffi/base/status.h"

namespace jaxcomm {

namespace internal {
extern std::atomic<bool> is_forked;
}  // namespace internal

// Call this where the process gets what no child of it can have: a thread, or memory
// that it shares with others. A process that was forked before has its own.
void CountForksFromNow();

// Whether this is a child that was forked after that. It has its parent's objects, but
// none of its threads. The descriptors and the shared memory belong to the parent: the
// child leaves them alone. A flag, because each call of a collective asks: getpid()
// takes as long as a small collective.
inline bool IsForked() { return internal::is_forked.load(std::memory_order_relaxed); }

// Why a forked child cannot have `what`.
Status ForkedError(std::string_view what);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_FORKED_H_
