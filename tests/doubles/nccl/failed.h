// What fails: devices, and calls.
//
// A kernel fault ends all GPU work of the process, as CUDA does it: what runs and what
// is enqueued never completes, and every later call of the driver returns the error.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_FAILED_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_FAILED_H_

#include <atomic>
#include <string>

#include "tests/doubles/nccl/exports.h"

namespace jaxcomm::fake {

// Seen on two H200s: a fault on one GPU fails the contexts of all GPUs of the process
// that have access to each other's memory. The first error stays.
void FailDevices(cuda::Result error);
// The error of the first fault; kSuccess before it.
cuda::Result DeviceFailure();

// Keeps `text` as the calling thread's last error, for ncclGetLastError; returns
// `result`.
nccl::Result Failure(nccl::Result result, const std::string& text);
// The same for a call of CUDA's that failed inside NCCL.
nccl::Result CudaFailure(cuda::Result result);
const std::string& LastFailure();

// Communicators that were destroyed or aborted so far.
inline std::atomic<uint64_t> ended_communicators{0};

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_FAILED_H_
