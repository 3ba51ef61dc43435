// Shared by the files of the extension module.
//
// Classes that Python passes as a shared_ptr inherit std::enable_shared_from_this.
// Otherwise the last owner takes the GIL, and a thread of ours that does so while the
// interpreter ends would crash the process.
#ifndef JAXCOMM_FFI_PYTHON_MODULE_H_
#define JAXCOMM_FFI_PYTHON_MODULE_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
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

template <typename T>
T ValueOf(ErrorOr<T> value) {
  ThrowIfFailed(value.status());
  return std::move(*value);
}

// What an object of Python's refers to, whose end waits, as that of devices: without
// the GIL.
template <typename T>
struct Held {
  explicit Held(std::shared_ptr<T> of) : of(std::move(of)) {}
  Held(Held&&) = default;
  ~Held() {
    if (of == nullptr) return;
    nanobind::gil_scoped_release release;
    of = nullptr;
  }

  std::shared_ptr<T> of;
};

// The part of a spec that all backends have.
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

struct NcclLibrary;

// Returns the loaded library. Throws if there is none, or the devices are stopped.
const NcclLibrary& Nccl();

// Adds what only NCCL's communicators count, if this is one.
void AddNcclStats(const Communicator& communicator, nanobind::dict& stats);

// Bind the parts of the module for NCCL.
void BindNccl(nanobind::module_& m);
void BindSymmetricMemory(nanobind::module_& m);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_PYTHON_MODULE_H_
