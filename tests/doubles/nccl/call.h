// What every exported function does first: write the trace, look for a fault that a
// test asked for, and hold the rules that real CUDA leaves to luck.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_CALL_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_CALL_H_

#include <string>

#include "tests/doubles/nccl/exports.h"

namespace jaxcomm::fake {

// What was called, in order; read through jaxcommFakeTrace(). A field that does not
// apply keeps its value here, and is left out of the text.
struct TraceEntry {
  const char* name = "";
  int64_t comm = 0;
  int64_t stream = -1;
  int64_t count = -1;
  int type = -1;
  int op = -1;
  int peer = -1;  // or root
  uint64_t group = 0;
  std::string detail = {};     // further JSON members
  std::string violation = {};  // the rule that the call broke
};

void Trace(const TraceEntry& entry);

// A failure that a test asks for.
struct Fault {
  int result = 0;         // what the call returns instead of doing anything
  bool hang = false;      // what it starts never completes
  bool connects = false;  // it does not return
};

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
  // The call, or the end of its group, must not return: NCCL connects to a rank at the
  // first use, and waits for that rank's process.
  bool connects() const { return connects_; }

 private:
  int refusal_ = 0;
  bool hangs_ = false;
  bool connects_ = false;
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
