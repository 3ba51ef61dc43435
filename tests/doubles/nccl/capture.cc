#include "tests/doubles/nccl/capture.h"

#include <map>
#include <mutex>
#include <thread>

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/handles.h"
#include "tests/doubles/nccl/trace.h"

namespace jaxcomm::fake {
namespace {

struct Captured {
  std::mutex mutex;
  std::map<cuda::Stream, std::thread::id> streams;  // and who captures them
  uint64_t graphs = 0, ended = 0;
};

Captured& TheCaptured() {
  static Captured& captured = *new Captured;
  return captured;
}

}  // namespace

bool IsCapturing(cuda::Stream stream) {
  Captured& captured = TheCaptured();
  std::lock_guard<std::mutex> lock(captured.mutex);
  return captured.streams.count(stream) != 0;
}

bool CapturesHere() {
  Captured& captured = TheCaptured();
  std::lock_guard<std::mutex> lock(captured.mutex);
  for (const auto& [stream, thread] : captured.streams) {
    if (thread == std::this_thread::get_id()) return true;
  }
  return false;
}

uint64_t LastGraph() {
  Captured& captured = TheCaptured();
  std::lock_guard<std::mutex> lock(captured.mutex);
  return captured.graphs;
}

bool HasEnded(uint64_t graph) {
  Captured& captured = TheCaptured();
  std::lock_guard<std::mutex> lock(captured.mutex);
  return graph <= captured.ended;
}

bool ViolatesCapture(const char* function, cuda::Stream stream) {
  if (!IsCapturing(stream)) return false;
  TraceEntry entry;
  entry.name = function;
  entry.stream = Number(stream);
  entry.violation = "not permitted while the stream is captured";
  Trace(entry);
  return true;
}

}  // namespace jaxcomm::fake

void jaxcommFakeSetCapturing(void* stream, bool capturing) {
  using namespace jaxcomm::fake;  // NOLINT: an exported function cannot live there
  Captured& captured = TheCaptured();
  std::lock_guard<std::mutex> lock(captured.mutex);
  if (capturing) {
    captured.streams[stream] = std::this_thread::get_id();
    ++captured.graphs;
  } else {
    captured.streams.erase(stream);
  }
}

void jaxcommFakeEndGraphs() {
  using namespace jaxcomm::fake;  // NOLINT: an exported function cannot live there
  Captured& captured = TheCaptured();
  std::lock_guard<std::mutex> lock(captured.mutex);
  captured.ended = captured.graphs;
}

namespace jaxcomm::cuda {

Result cuStreamIsCapturing(Stream stream, CaptureStatus* status) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuStreamIsCapturing", 0, fake::Number(stream));
  *status = fake::IsCapturing(stream) ? kCaptureActive : kCaptureNone;
  return kSuccess;
}

}  // namespace jaxcomm::cuda
