// What the files of the extension module share.
//
// What Python hands in as a shared_ptr inherits std::enable_shared_from_this: else
// nanobind would have the last owner take the GIL, and a thread of ours that does so
// while the interpreter ends takes the process down.
#ifndef JAXCOMM_FFI_PYTHON_MODULE_H_
#define JAXCOMM_FFI_PYTHON_MODULE_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

inline void ThrowIfFailed(const Status& status) {
  if (status.failure()) throw std::runtime_error(status.message());
}

// What all communicators are named by.
inline CommunicatorSpec SpecOf(int64_t key, std::string axes, std::string lane,
                               std::string backend, std::string platform,
                               double timeout_seconds,
                               std::vector<std::vector<int64_t>> groups) {
  CommunicatorSpec spec;
  spec.key = key;
  spec.axes = std::move(axes);
  spec.lane = std::move(lane);
  spec.backend = std::move(backend);
  spec.platform = std::move(platform);
  spec.timeout_seconds = timeout_seconds;
  spec.groups = std::move(groups);
  return spec;
}

// The part of the module that is about NCCL.
void BindNccl(nanobind::module_& m);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_PYTHON_MODULE_H_
