// What the library exports, declared from the tables that the real backend loads by:
// a definition with other parameters does not compile.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_EXPORTS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_EXPORTS_H_

#include "ffi/backends/nccl/cuda_api.h"
#include "ffi/backends/nccl/nccl_api.h"
#include "tests/doubles/nccl/controls.h"

namespace jaxcomm::nccl {
extern "C" {
#define JAXCOMM_FAKE_DECLARE(name, result, parameters) \
  JAXCOMM_FAKE_EXPORT result nccl##name parameters;
JAXCOMM_NCCL_REQUIRED(JAXCOMM_FAKE_DECLARE)
JAXCOMM_NCCL_OPTIONAL(JAXCOMM_FAKE_DECLARE)
#undef JAXCOMM_FAKE_DECLARE
}
}  // namespace jaxcomm::nccl

namespace jaxcomm::cuda {
extern "C" {
#define JAXCOMM_FAKE_DECLARE(exported, name, parameters) \
  JAXCOMM_FAKE_EXPORT Result exported parameters;
JAXCOMM_CUDA_FUNCTIONS(JAXCOMM_FAKE_DECLARE)
#undef JAXCOMM_FAKE_DECLARE
}

// Results that only the stand-in names.
inline constexpr Result kNotInitialized = static_cast<Result>(3);
inline constexpr Result kInvalidDevice = static_cast<Result>(101);
inline constexpr Result kInvalidContext = static_cast<Result>(201);
inline constexpr Result kInvalidPtx = static_cast<Result>(218);
inline constexpr Result kInvalidHandle = static_cast<Result>(400);
inline constexpr Result kNotFound = static_cast<Result>(500);
inline constexpr Result kNotPermitted = static_cast<Result>(800);
inline constexpr Result kCaptureUnsupported = static_cast<Result>(900);
inline constexpr Result kCapturedEvent = static_cast<Result>(907);

}  // namespace jaxcomm::cuda

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_EXPORTS_H_
