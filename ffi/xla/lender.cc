#include "ffi/xla/lender.h"

#include <cstring>

#if __has_include("xla/ffi/api/collectives_c_api.h")
#include "xla/ffi/api/collectives_c_api.h"

// Compiled with newer headers, the compiler checks our declarations against XLA's.
#define SAME_PLACE(ours, our_field, theirs, field) \
  static_assert(offsetof(jaxcomm::lending::ours, our_field) == offsetof(theirs, field))
SAME_PLACE(Extension, type, XLA_FFI_Extension, id.extension_type);
SAME_PLACE(Extension, major_version, XLA_FFI_Extension, id.major_version);
SAME_PLACE(Extension, minor_version, XLA_FFI_Extension, id.minor_version);
SAME_PLACE(Extension, next, XLA_FFI_Extension, next);
SAME_PLACE(FindExtensionArgs, context, XLA_FFI_InvokeContext_FindExtension_Args, ctx);
SAME_PLACE(FindExtensionArgs, extension, XLA_FFI_InvokeContext_FindExtension_Args,
           extension);
SAME_PLACE(Group, size, XLA_FFI_ReplicaGroup, size);
SAME_PLACE(RequestArgs, group_mode, XLA_FFI_Communicator_Request_Args, group_mode);
SAME_PLACE(RequestArgs, communication_id, XLA_FFI_Communicator_Request_Args,
           communication_id);
SAME_PLACE(GetArgs, groups, XLA_FFI_Communicator_Get_Args, groups);
SAME_PLACE(GetArgs, communicator, XLA_FFI_Communicator_Get_Args, communicator);
SAME_PLACE(Collectives, request_communicator, XLA_FFI_Collectives_Extension,
           request_communicator);
SAME_PLACE(Collectives, get_communicator, XLA_FFI_Collectives_Extension,
           get_communicator);
static_assert(jaxcomm::lending::kFindExtensionOffset ==
              offsetof(XLA_FFI_Api, XLA_FFI_InvokeContext_FindExtension));
static_assert(jaxcomm::lending::kCollectives == XLA_FFI_Extension_Collectives);
static_assert(jaxcomm::lending::kMajorVersion ==
              XLA_FFI_Extension_Collectives_MajorVersion);
static_assert(jaxcomm::lending::kFlattenedId == XLA_FFI_GROUP_FLATTENED_ID);
#undef SAME_PLACE
#endif

namespace jaxcomm {
namespace {

namespace ffi = xla::ffi;

Status Failure(const XLA_FFI_Api* api, XLA_FFI_Error* error, const char* what) {
  Status status =
      FailedPrecondition(what, ": ", ffi::internal::GetErrorMessage(api, error));
  ffi::internal::DestroyError(api, error);
  return status;
}

std::vector<lending::Group> Raw(const Lender::Groups& groups) {
  std::vector<lending::Group> raw;
  for (const auto& group : groups) raw.push_back({group.data(), group.size()});
  return raw;
}

// Sets what both kinds of arguments name.
template <typename Args>
Args ArgsOf(const std::vector<lending::Group>& groups, int64_t communication_id) {
  Args args{};
  args.groups = groups.data();
  args.num_groups = groups.size();
  args.communication_id = communication_id;
  return args;
}

// Null where XLA is too old to have the function.
lending::FindExtension* FindExtensionOf(const XLA_FFI_Api* api) {
  lending::FindExtension* found = nullptr;
  if (api->struct_size < lending::kFindExtensionOffset + sizeof(found)) return nullptr;
  std::memcpy(&found,
              reinterpret_cast<const char*>(api) + lending::kFindExtensionOffset,
              sizeof(found));
  return found;
}

}  // namespace

ErrorOr<Lender> Lender::Find(const XLA_FFI_Api* api, void* context) {
  constexpr char kRefused[] =
      "CommPolicy(source='xla'): XLA lends no communicator here: ";
  const auto refuse = [&](const auto&... why) {
    return FailedPrecondition(kRefused, why..., ". Use source='own'");
  };
  lending::FindExtension* const find = FindExtensionOf(api);
  if (find == nullptr) return refuse("its FFI is older than that of jaxlib 0.11.2");
  lending::FindExtensionArgs args;
  args.context = context;
  args.type = lending::kCollectives;
  if (XLA_FFI_Error* error = find(&args)) {
    return Failure(api, error, kRefused);
  }
  const lending::Extension* const found = args.extension;
  if (found == nullptr) return refuse("it has no collectives for these devices");
  if (found->major_version != lending::kMajorVersion) {
    return refuse("its extension for collectives has version ", found->major_version,
                  ".", found->minor_version, ", and jaxcomm knows 0");
  }
  // Fields are only ever added at its end.
  if (found->struct_size < sizeof(lending::Collectives)) {
    return refuse("its extension for collectives has ", found->struct_size,
                  " bytes, and jaxcomm needs ", sizeof(lending::Collectives));
  }
  return Lender(api, reinterpret_cast<const lending::Collectives*>(found));
}

Status Lender::Request(const Groups& groups, int64_t communication_id) const {
  const std::vector<lending::Group> raw = Raw(groups);
  auto args = ArgsOf<lending::RequestArgs>(raw, communication_id);
  XLA_FFI_Error* error = collectives_->request_communicator(collectives_, &args);
  if (error == nullptr) return OkStatus();
  return Failure(api_, error, "XLA refused to lend a communicator");
}

ErrorOr<void*> Lender::Get(const Groups& groups, int64_t communication_id) const {
  const std::vector<lending::Group> raw = Raw(groups);
  auto args = ArgsOf<lending::GetArgs>(raw, communication_id);
  if (XLA_FFI_Error* error = collectives_->get_communicator(collectives_, &args)) {
    return Failure(api_, error, "XLA did not lend the communicator");
  }
  return args.communicator;
}

}  // namespace jaxcomm
