#ifndef JAXCOMM_FFI_BASE_STATUS_H_
#define JAXCOMM_FFI_BASE_STATUS_H_

#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// XLA's own error value serves as our status, so that nothing is converted at
// the edge. A default-constructed Status is success.
using Status = xla::ffi::Error;
using ErrorCode = xla::ffi::ErrorCode;

inline Status OkStatus() { return Status::Success(); }

// Appends a part of StrCat(). Numbers look as printf("%d") and printf("%g") write them.
inline void AppendTo(std::string* out, std::string_view text) { out->append(text); }
template <typename Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
void AppendTo(std::string* out, Number number) {
  if constexpr (std::is_floating_point_v<Number>) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", static_cast<double>(number));
    out->append(text);
  } else {
    out->append(std::to_string(number));
  }
}

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::string out;
  (AppendTo(&out, parts), ...);
  return out;
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

// Evaluates `expression`, a Status, once and returns it from the calling function if it
// failed. The loop makes the macro one statement, so that an `else` cannot bind to it.
#define RETURN_IF_ERROR(expression)                                                    \
  do {                                                                                 \
    if (::jaxcomm::Status status_to_check = (expression); status_to_check.failure()) { \
      return status_to_check;                                                          \
    }                                                                                  \
  } while (false)

#endif  // JAXCOMM_FFI_BASE_STATUS_H_
