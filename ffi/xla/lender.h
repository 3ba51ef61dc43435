#ifndef JAXCOMM_FFI_XLA_LENDER_H_
#define JAXCOMM_FFI_XLA_LENDER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ffi/base/status.h"
#include "xla/ffi/api/ffi.h"

// What XLA's FFI adds from jaxlib 0.11.2 on to lend its communicators.
//
// Declared here as XLA's c_api.h and collectives_c_api.h lay it out, because XLA
// refuses handlers compiled with headers newer than its own: a package that serves
// every jaxlib is compiled with the oldest. lender.cc asks at run time whether XLA has
// this.
namespace jaxcomm::lending {

struct Extension {
  size_t struct_size;
  int64_t type;
  int32_t major_version;
  int32_t minor_version;
  const Extension* next;
};

struct FindExtensionArgs {
  size_t struct_size = sizeof(FindExtensionArgs);
  void* extension_start = nullptr;
  void* context;
  int64_t type;
  const Extension* extension = nullptr;  // out
};
using FindExtension = XLA_FFI_Error*(FindExtensionArgs*);

// The first function of XLA_FFI_Api that the oldest headers do not name.
inline constexpr size_t kFindExtensionOffset =
    XLA_FFI_STRUCT_SIZE(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);

inline constexpr int64_t kCollectives = 129;
inline constexpr int32_t kMajorVersion = 0;
// Of groups that are places in the device assignment.
inline constexpr int32_t kFlattenedId = 3;

struct Group {
  const int64_t* places;
  size_t size;
};

struct RequestArgs {
  size_t struct_size = sizeof(RequestArgs);
  void* extension_start = nullptr;
  int32_t group_mode = kFlattenedId;
  const Group* groups;
  size_t num_groups;
  int64_t communication_id;
};

struct GetArgs {
  size_t struct_size = sizeof(GetArgs);
  void* extension_start = nullptr;
  int32_t group_mode = kFlattenedId;
  const Group* groups;
  size_t num_groups;
  int64_t communication_id;
  void* communicator = nullptr;  // out
};

struct Collectives {
  Extension base;
  void* state;
  XLA_FFI_Error* (*request_communicator)(const Collectives* self, RequestArgs* args);
  XLA_FFI_Error* (*get_communicator)(const Collectives* self, GetArgs* args);
};

}  // namespace jaxcomm::lending

namespace jaxcomm {

// XLA as the lender of its communicators, during one call of a handler.
class Lender {
 public:
  using Groups = std::vector<std::vector<int64_t>>;

  // Fails if the XLA that calls us lends nothing: it is older, or runs CPU devices.
  static ErrorOr<Lender> Find(const XLA_FFI_Api* api, void* context);

  // Has XLA make the communicator before the program runs. In the prepare stage.
  Status Request(const Groups& groups, int64_t communication_id) const;

  // Returns the communicator, which stays XLA's. In the execute stage.
  ErrorOr<void*> Get(const Groups& groups, int64_t communication_id) const;

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
  using Type = jaxcomm::ErrorOr<jaxcomm::Lender>;

  // XLA's name for the context's type depends on the version.
  template <typename Context>
  static std::optional<Type> Decode(const XLA_FFI_Api* api, Context* context,
                                    DiagnosticEngine&) {
    return jaxcomm::Lender::Find(api, context);
  }
};

#endif  // JAXCOMM_FFI_XLA_LENDER_H_
