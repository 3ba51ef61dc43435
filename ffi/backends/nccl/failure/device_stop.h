// Stopping the GPUs of this process, so that nothing computed from a collective that
// failed can be read.
//
// A collective that waits for a rank which never comes can be ended in two ways.
// ncclCommAbort has its kernel leave: the stream goes on, XLA marks the results ready,
// and the program reads what was in memory. It also marks steps as done for
// peers whose bytes were never written. The other way is a fault: a kernel on a stream
// of ours makes a misaligned access. CUDA then ends all work of the process's GPUs, and
// every wait for it and every later use of them returns an error, so that XLA raises.
// Nothing is read, and operations cost nothing while all is well. The price: the GPUs
// are lost to this process, which has to be started anew.
//
// Measured on two H200s: the fault is reported 50 ms after the launch (a trap takes
// 345 ms, an access to unmapped memory 100 to 180). It is not reported before a kernel
// that fills the GPU is over, and not at all where CUDA_DEVICE_MAX_CONNECTIONS=1 queues
// it behind what hangs, or another thread waits for the device inside the driver: hence
// the last resort.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_DEVICE_STOP_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_DEVICE_STOP_H_

#include <chrono>
#include <cstdint>
#include <set>
#include <string>

#include "ffi/backends/nccl/library/library.h"
#include "ffi/base/status.h"

namespace jaxcomm {

// What happens to the process when a collective fails while a device is at it.
// The strictest comes last.
enum class OnFailure {
  kPoison,  // results have every bit set
  kRaise,   // the GPUs are stopped: every use of them raises
  kExit,    // the process ends
};

// Makes what stopping a device needs, once for each context.
Status PrepareDeviceStop(const NcclLibrary& library, cuda::Context context);

// Stops all devices that were prepared, and says why on stderr. Returns at once:
// another thread does it, and the process ends if that takes longer than two seconds.
// The first call counts.
//
// `late`: devices whose threads have not come to the operation that failed. They may be
// in a host callback, which XLA ends the process for if its device is stopped. So it
// waits for them, `patience` at most, or for a moment: nothing leaves a device that
// waits for them.
void StopDevices(const std::string& why, std::set<int64_t> late = {},
                 std::chrono::duration<double> patience = {});

// Says that a thread of a device came to an operation of a communicator that failed.
void CameTooLate(int64_t ordinal);
void ForgetThatCameTooLate();

// Whether StopDevices() was called: no CUDA or NCCL call makes sense any more, also
// where it waits for a device that is late.
bool DevicesAreStopped();

// Once StopDevices() was called, waits until no device does anything any more: nothing
// that a kernel leaves in memory can be read then.
void WaitForDeviceStop();

// Returns the error of every operation from then on.
Status DevicesStoppedError();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_FAILURE_DEVICE_STOP_H_
