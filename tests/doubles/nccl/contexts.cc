// Contexts. As unkind as the real thing: NCCL takes device 0 for a thread without one.
#include <atomic>
#include <vector>

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/settings.h"

namespace jaxcomm::fake {
namespace {

std::atomic<bool> initialized{false};

using References = std::map<int, int>;  // of each device's primary context

thread_local std::vector<cuda::Context> current;

constexpr int kFirstContext = 0x100;

const OpenKind kOpen("contexts", [] {
  size_t count = 0;
  Locked<References> references;
  for (int device = 0; device < kDevices; ++device) {
    count += static_cast<size_t>(references->operator[](device));
  }
  return count;
});

cuda::Context ContextOf(int device) {
  return reinterpret_cast<cuda::Context>(static_cast<uintptr_t>(kFirstContext) +
                                         static_cast<uintptr_t>(device));
}

int DeviceOf(cuda::Context context) {
  return static_cast<int>(Number(context)) - kFirstContext;
}

// XLA keeps the contexts of all devices as long as the process lives, whoever else
// releases them.
bool IsAlive(cuda::Context context) {
  const int device = DeviceOf(context);
  return device >= 0 && device < kDevices;
}

}  // namespace

int CurrentDevice() {
  return current.empty() || !IsAlive(current.back()) ? kNoDevice
                                                     : DeviceOf(current.back());
}

int RuntimeDevice() {
  const int device = CurrentDevice();
  return device == kNoDevice ? 0 : device;
}

void UseRuntime() {
  if (!current.empty()) return;
  Misuse("no context is current: the thread gets that of device 0, and its memory");
  if (IsAlive(ContextOf(0))) current.push_back(ContextOf(0));
}

void SetDevice(int device) {
  if (!current.empty()) current.back() = ContextOf(device);
}

}  // namespace jaxcomm::fake

namespace jaxcomm::cuda {

Result cuInit(unsigned) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuInit");
  fake::initialized = true;
  return kSuccess;
}

Result cuDriverGetVersion(int* version) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuDriverGetVersion");
  *version = 13000;
  return kSuccess;
}

Result cuDeviceGet(Device* device, int ordinal) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuDeviceGet");
  if (!fake::initialized) return kNotInitialized;
  if (ordinal < 0 || ordinal >= fake::kDevices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuDevicePrimaryCtxRetain");
  if (!fake::initialized) return kNotInitialized;
  if (device < 0 || device >= fake::kDevices) return kInvalidDevice;
  ++fake::Locked<fake::References>()->operator[](device);
  *context = fake::ContextOf(device);
  return kSuccess;
}

Result cuDevicePrimaryCtxRelease_v2(Device device) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuDevicePrimaryCtxRelease_v2");
  fake::Locked<fake::References> references;
  if (references->operator[](device) == 0) {
    fake::Misuse("a context that nobody has");
    return kInvalidContext;
  }
  --references->operator[](device);
  return kSuccess;
}

Result cuCtxGetCurrent(Context* context) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuCtxGetCurrent");
  *context = fake::current.empty() ? nullptr : fake::current.back();
  return kSuccess;
}

Result cuCtxPushCurrent_v2(Context context) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuCtxPushCurrent_v2");
  if (!fake::IsAlive(context)) {
    fake::Misuse("a context that nobody has");
    return kInvalidContext;
  }
  fake::current.push_back(context);
  return kSuccess;
}

Result cuCtxPopCurrent_v2(Context* context) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuCtxPopCurrent_v2");
  if (fake::current.empty()) {
    fake::Misuse("no context is current");
    return kInvalidContext;
  }
  if (context != nullptr) *context = fake::current.back();
  fake::current.pop_back();
  return kSuccess;
}

Result cuDeviceCanAccessPeer(int* can, Device, Device) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuDeviceCanAccessPeer");
  *can = 1;
  return kSuccess;
}

Result cuCtxEnablePeerAccess(Context context, unsigned) {
  JAXCOMM_FAKE_CALL(kForbidden, "cuCtxEnablePeerAccess");
  return fake::IsAlive(context) ? kSuccess : kInvalidContext;
}

}  // namespace jaxcomm::cuda
