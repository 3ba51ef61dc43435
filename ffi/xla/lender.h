#ifndef JAXCOMM_FFI_XLA_LENDER_H_
#define JAXCOMM_FFI_XLA_LENDER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/xla/lending.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// XLA as the lender of its communicators, during one call of a handler.
class Lender {
 public:
  using Groups = std::vector<std::vector<int64_t>>;

  // Fails if the XLA that calls us lends nothing: it is older, or runs CPU devices.
  static xla::ffi::ErrorOr<Lender> Find(const XLA_FFI_Api* api, void* context);

  // Has XLA make the communicator before the program runs. In the prepare stage.
  Status Request(const Groups& groups, int64_t communication_id) const;

  // Returns the communicator, which stays XLA's. In the execute stage.
  xla::ffi::ErrorOr<void*> Get(const Groups& groups, int64_t communication_id) const;

 private:
  Lender(const XLA_FFI_Api* api, const lending::Collectives* collectives)
      : api_(api), collectives_(collectives) {}

  const XLA_FFI_Api* api_;
  const lending::Collectives* collectives_;
};

}  // namespace jaxcomm

// Lets a handler ask for one: .Ctx<Lender>().
template <>
struct xla::ffi::CtxDecoding<jaxcomm::Lender> {
  using Type = ErrorOr<jaxcomm::Lender>;

  // XLA's name for the context's type depends on the version.
  template <typename Context>
  static std::optional<Type> Decode(const XLA_FFI_Api* api, Context* context,
                                    DiagnosticEngine&) {
    return jaxcomm::Lender::Find(api, context);
  }
};

#endif  // JAXCOMM_FFI_XLA_LENDER_H_
