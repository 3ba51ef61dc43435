// Streams that pretend to be captured, and what the real thing forbids meanwhile.
#include "tests/doubles/nccl/streams.h"

#include <thread>

#include "tests/doubles/nccl/call.h"
namespace jaxcomm::fake {
namespace {

struct Captured {
  std::map<cuda::Stream, std::thread::id> streams;  // and who captures them
  uint64_t graphs = 0, ended = 0;
};

}  // namespace

bool IsCapturing(cuda::Stream stream) {
  return Locked<Captured>()->streams.count(stream) != 0;
}

bool CapturesHere() {
  Locked<Captured> captured;
  for (const auto& [stream, thread] : captured->streams) {
    if (thread == std::this_thread::get_id()) return true;
  }
  return false;
}

uint64_t LastGraph() { return Locked<Captured>()->graphs; }

bool HasEnded(uint64_t graph) { return graph <= Locked<Captured>()->ended; }

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

namespace jaxcomm::cuda {

Result cuStreamIsCapturing(Stream stream, CaptureStatus* status) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuStreamIsCapturing", 0, fake::Number(stream));
  *status = fake::IsCapturing(stream) ? kCaptureActive : kCaptureNone;
  return kSuccess;
}

}  // namespace jaxcomm::cuda

void jaxcommFakeSetCapturing(void* stream, bool capturing) {
  using namespace jaxcomm::fake;  // NOLINT: an exported function cannot live there
  Locked<Captured> captured;
  if (capturing) {
    captured->streams[stream] = std::this_thread::get_id();
    ++captured->graphs;
  } else {
    captured->streams.erase(stream);
  }
}

void jaxcommFakeEndGraphs() {
  using namespace jaxcomm::fake;  // NOLINT: an exported function cannot live there
  Locked<Captured> captured;
  captured->ended = captured->graphs;
}
