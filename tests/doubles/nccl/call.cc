#include "tests/doubles/nccl/call.h"

#include <string_view>

#include "tests/doubles/nccl/capture.h"
#include "tests/doubles/nccl/errors.h"
#include "tests/doubles/nccl/failed.h"
#include "tests/doubles/nccl/faults.h"
#include "tests/doubles/nccl/group.h"

namespace jaxcomm::fake {

thread_local bool in_host_function = false;

namespace {

// What does not ask the device.
bool WorksAfterFault(std::string_view name) {
  return name == "cuInit" || name == "cuDriverGetVersion" || name == "cuDeviceGet" ||
         name == "cuDeviceGetCount" || name == "cuCtxGetCurrent" ||
         name == "cuCtxPushCurrent_v2" || name == "cuCtxPopCurrent_v2" ||
         name == "cuDevicePrimaryCtxRelease_v2" || name == "ncclGetVersion" ||
         name == "ncclCommGetAsyncError";
}

}  // namespace

Call::Call(const TraceEntry& entry, Capture capture) {
  const bool nccl = std::string_view(entry.name).substr(0, 4) == "nccl";
  cuda::Result cuda_result = cuda::kSuccess;
  TraceEntry written = entry;
  if (in_host_function) {
    written.violation = "called from a host function of a stream";
    cuda_result = cuda::kNotPermitted;
  } else if (capture == Capture::kForbidden && CapturesHere()) {
    written.violation = "not permitted while this thread captures a stream";
    cuda_result = cuda::kCaptureUnsupported;
  }
  Trace(written);
  if (cuda_result != cuda::kSuccess) {
    refusal_ = nccl ? static_cast<int>(CudaFailure(cuda_result)) : cuda_result;
    return;
  }
  if (DeviceFailure() != cuda::kSuccess && !WorksAfterFault(entry.name)) {
    refusal_ = nccl ? static_cast<int>(CudaFailure(DeviceFailure())) : DeviceFailure();
    return;
  }
  const Fault fault = TakeFault(entry.name);
  refusal_ = fault.result;
  hangs_ = fault.hang;
  if (nccl && refusal_ != 0) {
    Spoil(Failure(static_cast<nccl::Result>(refusal_),
                  std::string(entry.name) + " failed because a test asked for it"));
  }
}

}  // namespace jaxcomm::fake
