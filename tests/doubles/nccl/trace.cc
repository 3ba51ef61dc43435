#include "tests/doubles/nccl/trace.h"

#include <deque>
#include <mutex>

#include "tests/doubles/nccl/exports.h"

namespace jaxcomm::fake {
namespace {

constexpr size_t kCapacity = 65536;

struct Recorded {
  uint64_t index;
  int thread;
  int64_t times;
  TraceEntry entry;
};

struct Log {
  std::mutex mutex;
  uint64_t next = 0;
  int threads = 0;
  std::deque<Recorded> calls;
};

// Never destroyed: streams' threads outlive main().
Log& TheLog() {
  static Log& log = *new Log;
  return log;
}

bool SameCall(const TraceEntry& a, const TraceEntry& b) {
  return std::string_view(a.name) == b.name && a.comm == b.comm &&
         a.stream == b.stream && a.count == b.count && a.detail == b.detail &&
         a.violation == b.violation;
}

// Watchdogs would push everything else out of the trace.
bool IsPoll(std::string_view name) {
  return name == "ncclCommGetAsyncError" || name == "cuEventQuery" ||
         name == "cuStreamQuery" || name == "cuCtxGetCurrent" ||
         name == "ncclGetLastError" || name == "cuMemGetInfo_v2";
}

void AppendNumber(const char* name, int64_t value, int64_t absent, std::string* out) {
  if (value == absent) return;
  *out += std::string(", \"") + name + "\": " + std::to_string(value);
}

std::string Line(const Recorded& call) {
  const TraceEntry& entry = call.entry;
  std::string out = "{\"index\": " + std::to_string(call.index) +
                    ", \"thread\": " + std::to_string(call.thread) + ", \"name\": \"" +
                    entry.name + "\"";
  AppendNumber("comm", entry.comm, 0, &out);
  AppendNumber("stream", entry.stream, -1, &out);
  AppendNumber("count", entry.count, -1, &out);
  AppendNumber("type", entry.type, -1, &out);
  AppendNumber("op", entry.op, -1, &out);
  AppendNumber("peer", entry.peer, -1, &out);
  AppendNumber("group", static_cast<int64_t>(entry.group), 0, &out);
  AppendNumber("times", call.times, 1, &out);
  if (!entry.detail.empty()) out += ", " + entry.detail;
  if (!entry.violation.empty()) out += ", \"violation\": \"" + entry.violation + "\"";
  return out + "}\n";
}

}  // namespace

void Trace(const TraceEntry& entry) {
  thread_local int thread = -1;
  thread_local uint64_t last = 0;
  Log& log = TheLog();
  std::lock_guard<std::mutex> lock(log.mutex);
  if (thread < 0) thread = log.threads++;
  const uint64_t first = log.next - log.calls.size();
  if (IsPoll(entry.name) && last >= first && last < log.next) {
    Recorded& call = log.calls[last - first];
    if (call.thread == thread && SameCall(call.entry, entry)) {
      ++call.times;
      return;
    }
  }
  if (log.calls.size() == kCapacity) log.calls.pop_front();
  last = log.next++;
  log.calls.push_back({last, thread, 1, entry});
}

}  // namespace jaxcomm::fake

const char* jaxcommFakeTrace() {
  thread_local std::string text;
  jaxcomm::fake::Log& log = jaxcomm::fake::TheLog();
  std::lock_guard<std::mutex> lock(log.mutex);
  text.clear();
  for (const auto& call : log.calls) text += jaxcomm::fake::Line(call);
  return text.c_str();
}

void jaxcommFakeClearTrace() {
  jaxcomm::fake::Log& log = jaxcomm::fake::TheLog();
  std::lock_guard<std::mutex> lock(log.mutex);
  log.calls.clear();
}
