// The errors of NCCL and CUDA, and the words that these have for them.
#include "tests/doubles/nccl/failed.h"

#include <atomic>

namespace jaxcomm::fake {
namespace {

std::atomic<cuda::Result> failure{cuda::kSuccess};
thread_local std::string last_failure;

struct Text {
  int result;
  const char* text;
};

// Those of failures that tests cause; others have no text.
constexpr Text kOfNccl[] = {
    {nccl::kUnhandledCudaError,
     "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"},
    {nccl::kInternalError,
     "internal error - please report this issue to the NCCL developers"},
    {nccl::kInvalidArgument, "invalid argument (run with NCCL_DEBUG=WARN for details)"},
    {nccl::kInvalidUsage, "invalid usage (run with NCCL_DEBUG=WARN for details)"},
};

constexpr Text kOfCuda[] = {
    {cuda::kInvalidValue, "invalid argument"},
    {cuda::kOutOfMemory, "out of memory"},
    {cuda::kInvalidContext, "invalid device context"},
    {cuda::kCaptureUnsupported, "operation not permitted when stream is capturing"},
};

template <size_t kSize>
const char* Find(const Text (&texts)[kSize], int result, const char* otherwise) {
  for (const Text& each : texts) {
    if (each.result == result) return each.text;
  }
  return otherwise;
}

}  // namespace

void FailDevices(cuda::Result error) {
  cuda::Result none = cuda::kSuccess;
  failure.compare_exchange_strong(none, error);
}

cuda::Result DeviceFailure() { return failure.load(); }

nccl::Result Failure(nccl::Result result, const std::string& text) {
  last_failure = text;
  return result;
}

nccl::Result CudaFailure(cuda::Result result) {
  return Failure(nccl::kUnhandledCudaError,
                 "Cuda failure " + std::to_string(result) + " '" +
                     Find(kOfCuda, result, "unrecognized error code") + "'");
}

const std::string& LastFailure() { return last_failure; }

}  // namespace jaxcomm::fake

const char* jaxcomm::nccl::ncclGetErrorString(Result result) {
  return fake::Find(fake::kOfNccl, result, "unknown result code");
}

// Without a trace entry: error paths call it themselves.
jaxcomm::cuda::Result jaxcomm::cuda::cuGetErrorString(Result result,
                                                      const char** text) {
  *text = fake::Find(fake::kOfCuda, result, nullptr);
  return *text == nullptr ? kInvalidValue : kSuccess;
}
