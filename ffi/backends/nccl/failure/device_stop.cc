#include "ffi/backends/nccl/failure/device_stop.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/kernels/device_kernels.h"
#include "ffi/core/last_resort.h"
#include "ffi/os/mutex.h"
#include "ffi/os/say.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

// For the fault to be reported: 50 ms on an H200 whose GPU has room for one more block.
// A kernel that fills the GPU for longer than this costs the process its orderly end.
constexpr double kFaultSeconds = 2;
constexpr auto kLook = std::chrono::milliseconds(1);
// For the line on stderr, which may be a pipe that nobody reads.
constexpr std::chrono::duration<double> kLine{1};
// For a device whose thread is late.
constexpr std::chrono::duration<double> kMostPatience{30};

class Stopper {
 public:
  // Never destroyed: its thread runs as long as the process.
  static Stopper& Get() {
    static Stopper* const stopper = new Stopper;
    return *stopper;
  }

  Status Prepare(const NcclLibrary& library, cuda::Context context) {
    MutexLock lock(mutex_);
    for (const Device& device : devices_) {
      if (device.context == context) return OkStatus();
    }
    if (!LastResort::Prepare() || thread_.Start([this] { Run(); }).failure()) {
      return Status(ErrorCode::kResourceExhausted,
                    "no thread can be had to watch over collectives");
    }
    Device device;
    device.library = &library;
    device.context = context;
    CurrentContext current(library.cuda, context);
    ASSIGN_OR_RETURN(device.kernels, DeviceKernels::Load(library, context));
    // The highest priority there is: it is to overtake what waits.
    RETURN_IF_ERROR(library.Try(library.cuda.StreamCreateWithPriority, &device.stream,
                                cuda::kStreamNonBlocking, cuda::kHighestPriority));
    if (Status status = library.Try(library.cuda.MemAlloc, &device.memory, 64);
        status.failure()) {
      library.cuda.StreamDestroy(device.stream);
      return status;
    }
    devices_.push_back(std::move(device));
    return OkStatus();
  }

  void Stop(const std::string& why, std::set<int64_t> late,
            std::chrono::duration<double> patience) {
    {
      MutexLock lock(mutex_);
      if (is_stopped_) return;
      why_ = why;
      late_ = std::move(late);
      for (int64_t ordinal : came_) late_.erase(ordinal);
      patience_ = std::min(patience, kMostPatience);
      said_ = Say(StrCat("jaxcomm: ", why, "\n"));
      is_stopped_.store(true, std::memory_order_release);
    }
    changed_.NotifyAll();
  }

  void Came(int64_t ordinal) {
    MutexLock lock(mutex_);
    came_.insert(ordinal);
    if (late_.erase(ordinal) > 0) changed_.NotifyAll();
  }
  void Forget() {
    MutexLock lock(mutex_);
    came_.clear();
  }

  bool is_stopped() const { return is_stopped_.load(std::memory_order_acquire); }
  bool has_ended() const { return has_ended_.load(); }

  std::string why() {
    MutexLock lock(mutex_);
    return why_;
  }

 private:
  struct Device {
    const NcclLibrary* library = nullptr;
    cuda::Context context = nullptr;
    std::shared_ptr<const DeviceKernels> kernels;
    cuda::Stream stream = nullptr;
    cuda::Pointer memory = 0;
  };

  void Run() {
    std::vector<Device> devices;
    std::shared_future<void> said;
    {
      MutexLock lock(mutex_);
      changed_.Wait(mutex_, [this] { return is_stopped(); });
      changed_.WaitFor(mutex_, patience_,
                       [this]() REQUIRES(mutex_) { return late_.empty(); });
      devices = devices_;
      said = said_;
    }
    // CUDA's error does not say why, and a program that meets it may end.
    (void)said.wait_for(kLine);
    const LastResort end(kFaultSeconds,
                         "the GPUs could not be stopped: a kernel fills them, or a "
                         "call of the driver waits for them");
    for (Device& device : devices) {
      CurrentContext current(device.library->cuda, device.context);
      // It fails where the device has failed by itself.
      (void)device.kernels->Stop(device.memory, device.stream);
    }
    for (Device& device : devices) {
      CurrentContext current(device.library->cuda, device.context);
      // Anything but these two is the fault.
      cuda::Result result = cuda::kNotReady;
      while (result == cuda::kNotReady || result == cuda::kSuccess) {
        std::this_thread::sleep_for(kLook);
        result = device.library->cuda.StreamQuery(device.stream);
      }
    }
    has_ended_ = true;
  }

  Mutex mutex_;
  ConditionVariable changed_;
  std::vector<Device> devices_ GUARDED_BY(mutex_);
  std::set<int64_t> late_ GUARDED_BY(mutex_), came_ GUARDED_BY(mutex_);
  std::chrono::duration<double> patience_ GUARDED_BY(mutex_){};
  std::string why_ GUARDED_BY(mutex_);
  std::shared_future<void> said_ GUARDED_BY(mutex_);
  BackgroundThread thread_ GUARDED_BY(mutex_);
  std::atomic<bool> is_stopped_{false}, has_ended_{false};
};

}  // namespace

Status PrepareDeviceStop(const NcclLibrary& library, cuda::Context context) {
  return Stopper::Get().Prepare(library, context);
}

void StopDevices(const std::string& why, std::set<int64_t> late,
                 std::chrono::duration<double> patience) {
  Stopper::Get().Stop(why, std::move(late), patience);
}

void CameTooLate(int64_t ordinal) { Stopper::Get().Came(ordinal); }
void ForgetThatCameTooLate() { Stopper::Get().Forget(); }

bool DevicesAreStopped() { return Stopper::Get().is_stopped(); }

void WaitForDeviceStop() {
  while (DevicesAreStopped() && !Stopper::Get().has_ended()) {
    std::this_thread::sleep_for(kLook);
  }
}

Status DevicesStoppedError() {
  return Status(ErrorCode::kFailedPrecondition,
                StrCat("the GPUs of this process are stopped, because a collective "
                       "failed: ",
                       Stopper::Get().why()));
}

}  // namespace jaxcomm
