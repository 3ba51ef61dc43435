#include "tests/doubles/nccl/errors.h"

namespace jaxcomm::fake {
namespace {

thread_local std::string last_failure;

}  // namespace

nccl::Result Failure(nccl::Result result, const std::string& text) {
  last_failure = text;
  return result;
}

nccl::Result CudaFailure(cuda::Result result) {
  const char* text = nullptr;
  // Leaves it null for a number that it does not know.
  cuda::cuGetErrorString(result, &text);
  return Failure(nccl::kUnhandledCudaError,
                 "Cuda failure " + std::to_string(result) + " '" +
                     (text == nullptr ? "unrecognized error code" : text) + "'");
}

const std::string& LastFailure() { return last_failure; }

}  // namespace jaxcomm::fake

namespace jaxcomm::nccl {

const char* ncclGetErrorString(Result result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case kSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case kInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case kInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case kInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case kRemoteError:
      return "remote process exited or there was a network error";
    case kInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}

}  // namespace jaxcomm::nccl

namespace jaxcomm::cuda {

// Without a trace entry: error paths call it themselves.
Result cuGetErrorString(Result result, const char** text) {
  switch (static_cast<int>(result)) {
    case kSuccess:
      *text = "no error";
      return kSuccess;
    case kInvalidValue:
      *text = "invalid argument";
      return kSuccess;
    case kOutOfMemory:
      *text = "out of memory";
      return kSuccess;
    case kNotInitialized:
      *text = "initialization error";
      return kSuccess;
    case kInvalidDevice:
      *text = "invalid device ordinal";
      return kSuccess;
    case kInvalidContext:
      *text = "invalid device context";
      return kSuccess;
    case kInvalidHandle:
      *text = "invalid resource handle";
      return kSuccess;
    case kNotReady:
      *text = "device not ready";
      return kSuccess;
    case kNotPermitted:
      *text = "operation not permitted";
      return kSuccess;
    case kCaptureUnsupported:
      *text = "operation not permitted when stream is capturing";
      return kSuccess;
    case kCapturedEvent:
      *text = "operation not permitted on an event last recorded in a capturing stream";
      return kSuccess;
    default:
      *text = nullptr;
      return kInvalidValue;
  }
}

}  // namespace jaxcomm::cuda
