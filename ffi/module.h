// What the files of the extension module share.
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
