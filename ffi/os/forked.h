// Whether this process was forked off the one that loaded the package.
#ifndef JAXCOMM_FFI_OS_FORKED_H_
#define JAXCOMM_FFI_OS_FORKED_H_

namespace jaxcomm {

// Such a child has its parent's objects, but none of its threads; and what they hold of
// the system, descriptors and shared memory, is the parent's. It leaves them as they
// are.
bool IsForked();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_FORKED_H_
