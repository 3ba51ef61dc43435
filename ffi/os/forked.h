// Whether this process was forked from the one that loaded the package.
#ifndef JAXCOMM_FFI_OS_FORKED_H_
#define JAXCOMM_FFI_OS_FORKED_H_

namespace jaxcomm {

// A forked child has its parent's objects, but none of its threads. The descriptors and
// the shared memory belong to the parent: the child leaves them alone.
bool IsForked();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_FORKED_H_
