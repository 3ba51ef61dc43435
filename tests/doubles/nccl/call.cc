// What was called, the failures that a test asks for, and the rules of CUDA that the
// real driver does not check: it hangs, or goes on and is wrong.
#include "tests/doubles/nccl/call.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/failed.h"
#include "tests/doubles/nccl/group.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {

thread_local bool in_host_function = false;

namespace {

constexpr size_t kCapacity = 65536;

struct Recorded {
  uint64_t index;
  int thread;
  int64_t times;
  TraceEntry entry;
};

// The function that this thread is in.
thread_local const char* function_name = "";

struct Misused {
  std::string text;
};

using OpenKinds = std::map<std::string, CountOpen>;

struct Log {
  uint64_t next = 0;
  int threads = 0;
  std::deque<Recorded> calls;
};

bool SameCall(const TraceEntry& a, const TraceEntry& b) {
  return std::string_view(a.name) == b.name && a.comm == b.comm &&
         a.stream == b.stream && a.count == b.count && a.detail == b.detail &&
         a.violation == b.violation;
}

bool Has(std::string_view name, std::string_view part) {
  return name.find(part) != std::string_view::npos;
}

// Whether a caller can be told that it failed: what frees or asks has no answer.
bool MayFail(std::string_view name) {
  for (const char* part :
       {"launch", "Free", "Destroy", "Release", "Close", "Abort", "Finalize", "Unload",
        "Deregister", "Query", "Error", "CtxGet", "CtxPush", "CtxPop", "GetVersion",
        "MemGetInfo", "MemStats", "StreamSynchronize", "LaunchHostFunc"}) {
    if (Has(name, part)) return false;
  }
  return true;
}

// Watchdogs would push everything else out of the trace.
bool IsPoll(std::string_view name) {
  return name == "ncclCommGetAsyncError" || name == "cuEventQuery" ||
         name == "cuStreamQuery" || name == "cuCtxGetCurrent" ||
         name == "ncclGetLastError" || name == "cuMemGetInfo_v2";
}

// What of NCCL saves the device of the calling thread and sets it again at the end.
bool SetsDevice(std::string_view name) {
  return name != "ncclGetVersion" && name != "ncclGetUniqueId" &&
         name != "ncclCommGetAsyncError" && name != "ncclGroupStart";
}

// What does not ask the device.
bool WorksAfterFault(std::string_view name) {
  return name == "cuInit" || name == "cuDriverGetVersion" || name == "cuDeviceGet" ||
         name == "cuCtxGetCurrent" || name == "cuCtxPushCurrent_v2" ||
         name == "cuCtxPopCurrent_v2" || name == "cuDevicePrimaryCtxRelease_v2" ||
         name == "ncclGetVersion" || name == "ncclCommGetAsyncError" ||
         name == "ncclCommAbort";
}

std::string Line(const Recorded& call) {
  const TraceEntry& entry = call.entry;
  std::string out = "{\"index\": " + std::to_string(call.index) +
                    ", \"thread\": " + std::to_string(call.thread) + ", \"name\": \"" +
                    entry.name + "\"";
  const auto add = [&out](const char* name, int64_t value, int64_t absent) {
    if (value == absent) return;
    out += std::string(", \"") + name + "\": " + std::to_string(value);
  };
  add("comm", entry.comm, 0);
  add("stream", entry.stream, -1);
  add("count", entry.count, -1);
  add("type", entry.type, -1);
  add("op", entry.op, -1);
  add("peer", entry.peer, -1);
  add("group", static_cast<int64_t>(entry.group), 0);
  add("times", call.times, 1);
  if (!entry.detail.empty()) out += ", " + entry.detail;
  if (!entry.violation.empty()) out += ", \"violation\": \"" + entry.violation + "\"";
  return out + "}\n";
}

struct Planned {
  std::string function;
  int after;
  Fault fault;
};

// That of the environment comes first.
struct Faults {
  std::vector<Planned> planned;

  Faults() {
    char function[64];
    int after = 0, result = 0;
    const char* const text = std::getenv("JAXCOMM_FAKE_FAULTS");
    if (text != nullptr &&
        std::sscanf(text, "%63[^:]:%d:%d", function, &after, &result) == 3) {
      planned.push_back({function, after, Fault{result}});
    }
  }
};

// The fault that is due for this call of `function`; counts the call.
Fault TakeFault(const std::string& function) {
  Locked<Faults> faults;
  auto& planned = faults->planned;
  auto due = planned.end();
  for (auto fault = planned.begin(); fault != planned.end(); ++fault) {
    const bool is_any = fault->function == "*" && MayFail(function);
    if (!is_any && fault->function != function) continue;
    if (fault->after > 0) {
      --fault->after;
    } else if (due == planned.end()) {
      due = fault;
    }
  }
  if (due == planned.end()) return {};
  const Fault fault = due->fault;
  planned.erase(due);
  return fault;
}

}  // namespace

void Misuse(const std::string& how) {
  const std::string line = std::string(function_name) + ": " + how + "\n";
  // At once: many processes end by a kill.
  std::fprintf(stderr, "misuse of the stand-in: %s", line.c_str());
  Locked<Misused>()->text += line;
}

OpenKind::OpenKind(const char* name, CountOpen count) {
  Locked<OpenKinds>()->operator[](name) = count;
}

void Trace(const TraceEntry& entry) {
  thread_local int thread = -1;
  thread_local uint64_t last = 0;
  Locked<Log> log;
  if (thread < 0) thread = log->threads++;
  const uint64_t first = log->next - log->calls.size();
  if (IsPoll(entry.name) && last >= first && last < log->next) {
    Recorded& call = log->calls[last - first];
    if (call.thread == thread && SameCall(call.entry, entry)) {
      ++call.times;
      return;
    }
  }
  if (log->calls.size() == kCapacity) log->calls.pop_front();
  last = log->next++;
  log->calls.push_back({last, thread, 1, entry});
}

Call::Call(const TraceEntry& entry, Capture capture) {
  const bool nccl = std::string_view(entry.name).substr(0, 4) == "nccl";
  cuda::Result refused = cuda::kSuccess;
  TraceEntry written = entry;
  function_name = entry.name;
  if (in_host_function) {
    written.violation = "called from a host function of a stream";
    refused = cuda::kNotPermitted;
  } else if (capture == Capture::kForbidden && CapturesHere()) {
    written.violation = "not permitted while this thread captures a stream";
    refused = cuda::kCaptureUnsupported;
  }
  Trace(written);
  if (nccl && SetsDevice(entry.name)) UseRuntime();
  if (refused == cuda::kSuccess && !WorksAfterFault(entry.name)) {
    refused = DeviceFailure();
  }
  if (refused != cuda::kSuccess) {
    refusal_ = nccl ? static_cast<int>(CudaFailure(refused)) : refused;
    return;
  }
  const Fault fault = TakeFault(entry.name);
  refusal_ = fault.result;
  hangs_ = fault.hang;
  connects_ = fault.connects;
  if (nccl && refusal_ != 0) {
    Spoil(Failure(static_cast<nccl::Result>(refusal_),
                  std::string(entry.name) + " failed because a test asked for it"));
  }
}

}  // namespace jaxcomm::fake

using namespace jaxcomm::fake;  // NOLINT: exported functions cannot live there

const char* jaxcommFakeTrace() {
  thread_local std::string text;
  Locked<Log> log;
  text.clear();
  for (const Recorded& call : log->calls) text += Line(call);
  return text.c_str();
}

void jaxcommFakeClearTrace() { Locked<Log>()->calls.clear(); }

void jaxcommFakeFail(const char* function, int after, int result) {
  Locked<Faults>()->planned.push_back({function, after, {result, false}});
}

void jaxcommFakeHang(const char* function, int after) {
  Locked<Faults>()->planned.push_back({function, after, {0, true}});
}

void jaxcommFakeConnect(const char* function, int after) {
  Locked<Faults>()->planned.push_back({function, after, {0, false, true}});
}

int jaxcommFakeMayFail(const char* function) { return MayFail(function); }

int jaxcommFakeForgetFaults() {
  Locked<Faults> faults;
  const auto forgotten = static_cast<int>(faults->planned.size());
  faults->planned.clear();
  return forgotten;
}

const char* jaxcommFakeMisuse() {
  thread_local std::string text;
  text.clear();
  std::swap(text, Locked<Misused>()->text);
  return text.c_str();
}

const char* jaxcommFakeOpen() {
  thread_local std::string text;
  const OpenKinds kinds = *Locked<OpenKinds>().operator->();
  text.clear();
  for (const auto& [name, count] : kinds) {
    const size_t open = count();
    if (open > 0) text += name + ": " + std::to_string(open) + "\n";
  }
  return text.c_str();
}
