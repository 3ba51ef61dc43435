// Calls of CPU devices, which a test double serves (test_double.h).
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_DOUBLE_CALLS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_DOUBLE_CALLS_H_

#include <functional>
#include <memory>

#include "ffi/backends/nccl/library.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

struct DoubleCall {
  const void* world = nullptr;  // calls of one world are issued in one order
  const void* owner = nullptr;  // whose calls the double may be told to abandon
  size_t member = 0;
  cuda::Stream stream = nullptr;
  std::shared_ptr<void> kept;  // until the call is done
};

// Has the double call issue() when it is the call's turn. The future completes once
// `stream` is done with what issue() gave it.
xla::ffi::Future IssueInOrder(const NcclLibrary& library, const DoubleCall& of,
                              const Call& call,
                              std::function<Status(const Call&)> issue);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_DOUBLE_CALLS_H_
