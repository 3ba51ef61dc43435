// The version that the library pretends to be, and what that version has.
#include <string_view>

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/errors.h"
#include "tests/doubles/nccl/settings.h"

namespace jaxcomm::fake {
namespace {

struct Since {
  std::string_view function;
  int version;
};

constexpr Since kSince[] = {
    {"ncclMemAlloc", 21900},
    {"ncclMemFree", 21900},
    {"ncclCommRegister", 21900},
    {"ncclCommDeregister", 21900},
    {"ncclCommWindowRegister", 22700},
    {"ncclCommWindowDeregister", 22700},
    {"ncclAlltoAll", 22800},
    {"ncclGather", 22800},
    {"ncclScatter", 22800},
    {"ncclCommRevoke", 22809},
    {"ncclCommSuspend", 22907},
    {"ncclCommResume", 22907},
    {"ncclCommMemStats", 22907},
};

constexpr std::string_view kExported[] = {
#define JAXCOMM_FAKE_NAME(name, result, parameters) "nccl" #name,
    JAXCOMM_NCCL_REQUIRED(JAXCOMM_FAKE_NAME) JAXCOMM_NCCL_OPTIONAL(JAXCOMM_FAKE_NAME)
#undef JAXCOMM_FAKE_NAME
#define JAXCOMM_FAKE_NAME(exported, name, parameters) #exported,
        JAXCOMM_CUDA_FUNCTIONS(JAXCOMM_FAKE_NAME)
#undef JAXCOMM_FAKE_NAME
};

}  // namespace
}  // namespace jaxcomm::fake

int jaxcommFakeHas(const char* function) {
  using namespace jaxcomm::fake;  // NOLINT: an exported function cannot live there
  for (const Since& since : kSince) {
    if (since.function == function) return NcclVersion() >= since.version ? 1 : 0;
  }
  for (const std::string_view exported : kExported) {
    if (exported == function) return 1;
  }
  return 0;
}

namespace jaxcomm::nccl {

Result ncclGetVersion(int* version) {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclGetVersion");
  if (version == nullptr) return fake::Failure(kInvalidArgument, "version is null");
  *version = fake::NcclVersion();
  return kSuccess;
}

}  // namespace jaxcomm::nccl
