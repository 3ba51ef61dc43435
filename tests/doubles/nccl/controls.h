// A stand-in for libnccl and libcuda in one shared library, which the loader also finds
// as libcuda.so.1 once it is loaded. "Device memory" is host
// memory, a stream is a thread, and ranks are threads of one process or processes of
// one host: everything the real backend does can be tested without a GPU.
//
// Settings, read when a call first needs them:
//   JAXCOMM_FAKE_NCCL_VERSION  the version it pretends to be (23203, which is 2.32.3)
//   JAXCOMM_FAKE_FAULTS        "ncclAllReduce:3:2": a call that fails, as
//                              function:after:result
//   JAXCOMM_FAKE_KERNELS=1     it has this package's kernels of small sums; otherwise
//                              it says that there are none, and NCCL adds
//   NCCL_MULTI_RANK_GPU_ENABLE=1   as in NCCL 2.30.3
//
// Beyond what the real libraries export there are these, to steer it and to look
// inside.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_CONTROLS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_CONTROLS_H_

#include <cstdint>

extern "C" {

#define JAXCOMM_FAKE_EXPORT __attribute__((visibility("default")))

// Plays XLA:GPU for CPU devices (xla.cc): makes, of an XLA_FFI_Handler of GPUs, one
// that XLA:CPU may call. `type_id`: the XLA_FFI_TypeId of the handler's state. There is
// one such handler in a process.
JAXCOMM_FAKE_EXPORT void* jaxcommFakeXla(void* handler, const void* type_id);

// The calls so far, one JSON object a line, oldest first; the last 65536 are kept.
// Polls repeated by one thread are one line with "times". The text belongs to the
// calling thread and lives until its next call of this function.
JAXCOMM_FAKE_EXPORT const char* jaxcommFakeTrace(void);
JAXCOMM_FAKE_EXPORT void jaxcommFakeClearTrace(void);

// The `after`-th next call of `function` (0: the very next) returns `result` and does
// nothing. "*": of any function whose failure its caller is to tell on.
JAXCOMM_FAKE_EXPORT void jaxcommFakeFail(const char* function, int after, int result);

// The operation, ncclCommInitRankConfig or ncclCommSplit of the `after`-th next call
// of `function` does not complete until its communicator is aborted.
JAXCOMM_FAKE_EXPORT void jaxcommFakeHang(const char* function, int after);

// The `after`-th next call of `function`, an operation, does not return until its
// communicator is aborted, nor does the end of its group.
JAXCOMM_FAKE_EXPORT void jaxcommFakeConnect(const char* function, int after);
// Whether it is one of "*".
JAXCOMM_FAKE_EXPORT int jaxcommFakeMayFail(const char* function);
// Forgets those that were planned and are not due yet. Returns how many.
JAXCOMM_FAKE_EXPORT int jaxcommFakeForgetFaults(void);

// What callers did against the rules of NCCL and CUDA since it was asked last, line by
// line: they used what they had ended, ended it twice, or used it on another device. It
// is said on stderr, too.
JAXCOMM_FAKE_EXPORT const char* jaxcommFakeMisuse(void);
// What callers have made and not ended, "streams: 3" line by line.
JAXCOMM_FAKE_EXPORT const char* jaxcommFakeOpen(void);

// Gives a communicator, named by its number in the trace, an asynchronous error.
// Returns 0 if there is no such communicator.
JAXCOMM_FAKE_EXPORT int jaxcommFakeAsyncError(int64_t communicator, int result);

// Pretends that `stream` is being captured, by the calling thread and in CUDA's
// thread-local mode: until it is switched off this thread may not allocate, create
// communicators or register, and nobody may wait for the stream. Such calls fail and
// are marked "violation" in the trace. What is enqueued still runs. A communicator of
// it is freed, as in NCCL, once the graphs have ended.
JAXCOMM_FAKE_EXPORT void jaxcommFakeSetCapturing(void* stream, bool capturing);
JAXCOMM_FAKE_EXPORT void jaxcommFakeEndGraphs(void);

}  // extern "C"

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_CONTROLS_H_
