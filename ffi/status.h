#ifndef JAXCOMM_FFI_STATUS_H_
#define JAXCOMM_FFI_STATUS_H_

#include <sstream>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// XLA's own error value serves as our status, so that nothing is converted at
// the edge. A default-constructed Status is success.
using Status = xla::ffi::Error;
using ErrorCode = xla::ffi::ErrorCode;

inline Status OkStatus() { return Status::Success(); }

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
Status InvalidArgument(const Parts&... parts) {
  return Status(ErrorCode::kInvalidArgument, StrCat(parts...));
}

template <typename... Parts>
Status FailedPrecondition(const Parts&... parts) {
  return Status(ErrorCode::kFailedPrecondition, StrCat(parts...));
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_STATUS_H_
