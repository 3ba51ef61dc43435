// Which functions of NCCL's the pretended version has. The others are not found: what
// looks them up gets null, as from the library of that version.
#include "tests/doubles/nccl/controls.h"
#include "tests/doubles/nccl/settings.h"

// Since when NCCL has a function, whose definition has the name that exports.h gives
// it. The loader asks the function after `ifunc` what the name stands for.
#define JAXCOMM_FAKE_SINCE(version, name)                                           \
  extern "C" {                                                                      \
  __attribute__((visibility("hidden"))) void jaxcommFake_##name();                  \
  using Function_##name = void (*)();                                               \
  __attribute__((used)) static Function_##name jaxcommFakeFind_##name() {           \
    return jaxcomm::fake::NcclVersion() < version ? nullptr : jaxcommFake_##name;   \
  }                                                                                 \
  JAXCOMM_FAKE_EXPORT void name() __attribute__((ifunc("jaxcommFakeFind_" #name))); \
  }

JAXCOMM_FAKE_SINCE(21900, ncclMemAlloc)
JAXCOMM_FAKE_SINCE(21900, ncclMemFree)
JAXCOMM_FAKE_SINCE(21900, ncclCommRegister)
JAXCOMM_FAKE_SINCE(21900, ncclCommDeregister)
JAXCOMM_FAKE_SINCE(22700, ncclCommWindowRegister)
JAXCOMM_FAKE_SINCE(22700, ncclCommWindowDeregister)
JAXCOMM_FAKE_SINCE(22800, ncclAlltoAll)
JAXCOMM_FAKE_SINCE(22800, ncclGather)
JAXCOMM_FAKE_SINCE(22800, ncclScatter)
JAXCOMM_FAKE_SINCE(22907, ncclCommMemStats)
