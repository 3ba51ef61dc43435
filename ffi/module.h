// What the files of the extension module share.
//
// What Python hands in as a shared_ptr inherits std::enable_shared_from_this: else
// nanobind would have the last owner take the GIL, and a thread of ours that does so
// while the interpreter ends takes the process down.
#ifndef JAXCOMM_FFI_MODULE_H_
#define JAXCOMM_FFI_MODULE_H_

#include <nanobind/nanobind.h>

#include <stdexcept>

#include "ffi/status.h"

namespace jaxcomm {

inline void ThrowIfFailed(const Status& status) {
  if (status.failure()) throw std::runtime_error(status.message());
}

// The part of the module that is about NCCL.
void BindNccl(nanobind::module_& m);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_MODULE_H_
