// What every exported function does first: write the trace, look for a fault that a
// test asked for, and hold the rules that real CUDA leaves to luck.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_CALL_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_CALL_H_

#include "tests/doubles/nccl/exports.h"
#include "tests/doubles/nccl/trace.h"

namespace jaxcomm::fake {

enum class Capture {
  kAllowed,
  kForbidden,  // allocates or waits: not while this thread captures a stream
};

class Call {
 public:
  explicit Call(const TraceEntry& entry, Capture capture = Capture::kAllowed);

  // To be returned at once unless 0. A number of CUDA's for functions of CUDA's.
  int refusal() const { return refusal_; }
  // What the call starts must not complete.
  bool hangs() const { return hangs_; }

 private:
  int refusal_ = 0;
  bool hangs_ = false;
};

// Set on a stream's thread while it runs a host function, where CUDA allows no calls.
extern thread_local bool in_host_function;

}  // namespace jaxcomm::fake

// Begins a function whose results are `Result`s of the surrounding namespace. Further
// arguments are the fields of the TraceEntry after its name.
#define JAXCOMM_FAKE_CALL(capture, ...)                                      \
  const ::jaxcomm::fake::Call call(::jaxcomm::fake::TraceEntry{__VA_ARGS__}, \
                                   ::jaxcomm::fake::Capture::capture);       \
  if (call.refusal() != 0) return static_cast<Result>(call.refusal())

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_CALL_H_
