// Tests what we ask of XLA to borrow its communicators, against an XLA of our own.
#include "ffi/xla/lender.h"

#include <cstring>

#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

// The functions that jaxcomm calls, laid out as XLA's newer headers have them.
struct Xla {
  struct GetMessageArgs {
    size_t struct_size;
    void* extension_start;
    XLA_FFI_Error* error;
    const char* message;
  };

  Xla() {
    Api()->struct_size = sizeof(bytes);
    // Next to the function that makes errors: its name depends on the version.
    Put(
        offsetof(XLA_FFI_Api, XLA_FFI_Error_Create) + sizeof(void*),
        +[](GetMessageArgs* args) {
          args->message = reinterpret_cast<const char*>(args->error);
        });
    Put(
        offsetof(XLA_FFI_Api, XLA_FFI_Error_Destroy),
        +[](XLA_FFI_Error_Destroy_Args*) { ++destroyed; });
    Put(
        lending::kFindExtensionOffset, +[](lending::FindExtensionArgs* args) {
          auto* self = static_cast<Xla*>(args->context);
          if (self->find_error != nullptr) return Error(self->find_error);
          if (self->has_extension && args->type == lending::kCollectives) {
            args->extension = &self->collectives.base;
          }
          return Error(nullptr);
        });
    collectives.base = {sizeof(collectives), lending::kCollectives, 0, 2, nullptr};
    collectives.state = this;
    collectives.request_communicator = &Request;
    collectives.get_communicator = &Get;
    destroyed = 0;
  }

  XLA_FFI_Api* Api() { return reinterpret_cast<XLA_FFI_Api*>(bytes); }
  xla::ffi::ErrorOr<Lender> Find() { return Lender::Find(Api(), this); }
  std::string Refusal() {
    const auto found = Find();
    return found ? "" : found.error().message();
  }

  template <typename Function>
  void Put(size_t offset, Function* function) {
    std::memcpy(bytes + offset, &function, sizeof(function));
  }
  static XLA_FFI_Error* Error(const char* text) {
    return reinterpret_cast<XLA_FFI_Error*>(const_cast<char*>(text));
  }

  template <typename Args>
  static XLA_FFI_Error* Note(const lending::Collectives* from, Args* args) {
    auto* self = static_cast<Xla*>(from->state);
    self->asked.clear();
    for (size_t i = 0; i < args->num_groups; ++i) {
      const lending::Group& group = args->groups[i];
      self->asked.emplace_back(group.places, group.places + group.size);
    }
    self->id = args->communication_id;
    self->mode = args->group_mode;
    return Error(self->lend_error);
  }
  static XLA_FFI_Error* Request(const lending::Collectives* from,
                                lending::RequestArgs* args) {
    return Note(from, args);
  }
  static XLA_FFI_Error* Get(const lending::Collectives* from, lending::GetArgs* args) {
    args->communicator = from->state;
    return Note(from, args);
  }

  alignas(XLA_FFI_Api) char bytes[lending::kFindExtensionOffset + sizeof(void*)] = {};
  lending::Collectives collectives;
  bool has_extension = true;
  const char* find_error = nullptr;
  const char* lend_error = nullptr;
  Lender::Groups asked;
  int64_t id = -1;
  int32_t mode = -1;
  static inline int destroyed = 0;
};

const Lender::Groups kGroups = {{0, 2}, {1, 3, 5}};

TEST(the_groups_and_the_id_arrive) {
  Xla xla;
  const auto lender = xla.Find();
  CHECK_TRUE(lender.has_value());
  CHECK_TRUE(lender->Request(kGroups, 77).success());
  CHECK_TRUE(xla.asked == kGroups);
  CHECK_EQ(xla.id, 77);
  CHECK_EQ(xla.mode, 3);

  xla.asked.clear();
  const auto lent = lender->Get(kGroups, 78);
  CHECK_TRUE(lent.has_value() && *lent == &xla);
  CHECK_TRUE(xla.asked == kGroups);
  CHECK_EQ(xla.id, 78);
}

TEST(what_xla_refuses_is_said_and_its_error_freed) {
  Xla xla;
  xla.lend_error = "no clique";
  const auto lender = xla.Find();
  CHECK_CONTAINS(lender->Request(kGroups, 1).message(), "refused to lend");
  CHECK_CONTAINS(lender->Get(kGroups, 1).error().message(), "no clique");
  CHECK_EQ(Xla::destroyed, 2);
  xla.find_error = "no context";
  CHECK_CONTAINS(xla.Refusal(), "no context");
  CHECK_EQ(Xla::destroyed, 3);
}

TEST(what_cannot_lend_is_told_and_not_asked) {
  const auto refusal = [](const auto& change) {
    Xla xla;
    change(xla);
    return xla.Refusal();
  };
  CHECK_CONTAINS(refusal([](Xla& xla) {
                   xla.Api()->struct_size = lending::kFindExtensionOffset;
                   xla.find_error = "asked";
                 }),
                 "older than that of jaxlib 0.11.2");
  CHECK_CONTAINS(refusal([](Xla& xla) { xla.has_extension = false; }),
                 "no collectives for these devices. Use source='own'");
  CHECK_CONTAINS(refusal([](Xla& xla) { xla.collectives.base.major_version = 1; }),
                 "has version 1.2, and jaxcomm knows 0");
  CHECK_CONTAINS(
      refusal([](Xla& xla) { xla.collectives.base.struct_size -= sizeof(void*); }),
      "bytes, and jaxcomm needs");
}

}  // namespace
}  // namespace jaxcomm::testing
