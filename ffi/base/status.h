#ifndef JAXCOMM_FFI_BASE_STATUS_H_
#define JAXCOMM_FFI_BASE_STATUS_H_

#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// XLA's own error value serves as our status, so that nothing is converted at
// the edge. A default-constructed Status is success.
using Status = xla::ffi::Error;
using ErrorCode = xla::ffi::ErrorCode;

inline Status OkStatus() { return Status::Success(); }

// A value, or why there is none. Made of either; XLA's own wants errors wrapped.
template <typename T>
class ErrorOr : public xla::ffi::ErrorOr<T> {
 public:
  using Base = xla::ffi::ErrorOr<T>;
  ErrorOr(Status error) : Base(xla::ffi::Unexpected(std::move(error))) {}
  template <typename U, std::enable_if_t<std::is_convertible_v<U, T> &&
                                             !std::is_base_of_v<Base, std::decay_t<U>>,
                                         int> = 0>
  ErrorOr(U&& value) : Base(T(std::forward<U>(value))) {}

  // OkStatus() if there is a value.
  Status status() const { return this->has_error() ? this->error() : OkStatus(); }
};

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

// Evaluates an expression, an ErrorOr, once. Returns its error from the calling
// function if it has one; else gives its value to `variable`, which may be declared
// here.
#define ASSIGN_OR_RETURN(variable, ...) \
  ASSIGN_OR_RETURN_BY(JAXCOMM_JOIN(error_or_, __LINE__), variable, __VA_ARGS__)
#define ASSIGN_OR_RETURN_BY(error_or, variable, ...)            \
  auto error_or = __VA_ARGS__;                                  \
  if (error_or.has_error()) return std::move(error_or.error()); \
  variable = std::move(*error_or)
#define JAXCOMM_JOIN(a, b) JAXCOMM_JOIN_EXPANDED(a, b)
#define JAXCOMM_JOIN_EXPANDED(a, b) a##b

#endif  // JAXCOMM_FFI_BASE_STATUS_H_
