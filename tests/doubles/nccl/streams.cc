// Streams, and events: each event remembers its last record, a moment of a stream. And
// streams that pretend to be captured, and what the real thing forbids meanwhile.
#include "tests/doubles/nccl/streams.h"

#include <cfenv>
#include <thread>
#include <vector>

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/failed.h"

namespace jaxcomm::fake {
namespace {

constexpr size_t kMostQueued = 1024;

// Those of all devices that run.
struct Running {
  std::vector<std::weak_ptr<Stream>> streams;
};

Handles<cuda::Stream, Stream>& Streams() {
  static auto& streams = *new Handles<cuda::Stream, Stream>(0x1000);
  return streams;
}

const OpenKind kOpenStreams("streams", [] { return Streams().size(); });

std::shared_ptr<Stream> DefaultStream(int device) {
  Locked<std::map<int, std::shared_ptr<Stream>>> streams;
  std::shared_ptr<Stream>& stream = streams->operator[](device);
  if (stream == nullptr) stream = Stream::Start(device);
  return stream;
}

}  // namespace

void Moment::Pass() {
  std::lock_guard<std::mutex> lock(mutex_);
  passed_ = true;
  changed_.notify_all();
}

void Moment::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!passed_ && DeviceFailure() == cuda::kSuccess) {
    // By the system's clock: ThreadSanitizer does not see waits by another.
    changed_.wait_until(lock, std::chrono::system_clock::now() + kLook);
  }
}

bool Moment::passed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return passed_;
}

std::shared_ptr<Stream> Stream::Start(int device) {
  std::shared_ptr<Stream> stream(new Stream(device));
  {
    Locked<Running> running;
    auto& streams = running->streams;
    for (size_t i = streams.size(); i-- > 0;) {
      if (streams[i].expired()) {
        streams.erase(streams.begin() + static_cast<ptrdiff_t>(i));
      }
    }
    streams.push_back(stream);
  }
  // Detached: destroying a stream does not wait for its work, and at exit a stream may
  // hang in an operation that nobody aborted.
  std::thread([stream] {
    // Threads of XLA:CPU flush denormal numbers, and so do those that they start.
    std::fesetenv(FE_DFL_ENV);
    stream->Run();
  }).detach();
  return stream;
}

void Stream::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    taken_.notify_one();
    if (DeviceFailure() == cuda::kSuccess) {
      work.run();
    } else if (work.dropped != nullptr) {
      work.dropped();
    }
    work = {};  // what it holds goes before the stream counts as idle
    lock.lock();
    busy_ = false;
  }
}

void Stream::Enqueue(std::function<void()> work, std::function<void()> dropped) {
  std::unique_lock<std::mutex> lock(mutex_);
  taken_.wait(lock, [this] { return queue_.size() < kMostQueued; });
  queue_.push_back({std::move(work), std::move(dropped)});
  changed_.notify_one();
}

std::shared_ptr<Moment> Stream::Mark() {
  auto moment = std::make_shared<Moment>();
  Enqueue([moment] { moment->Pass(); });
  return moment;
}

void Stream::WaitFor(std::shared_ptr<Moment> moment) {
  Enqueue([moment = std::move(moment)] { moment->Wait(); });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_one();
}

void WaitForDevice(int device) {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    Locked<Running> running;
    for (const auto& each : running->streams) {
      auto stream = each.lock();
      if (stream != nullptr && stream->device() == device) {
        streams.push_back(std::move(stream));
      }
    }
  }
  for (const auto& stream : streams) {
    while (!stream->idle() && DeviceFailure() == cuda::kSuccess) {
      std::this_thread::sleep_for(kLook);
    }
  }
}

cuda::Stream NewStream(int device) { return Streams().Add(Stream::Start(device)); }

std::shared_ptr<Stream> FindStream(cuda::Stream stream, int device) {
  if (Number(stream) > 2) return Streams().Find(stream);
  return device == kNoDevice ? nullptr : DefaultStream(device);
}

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

namespace {

struct Event {
  explicit Event(int device) : device(device) {}
  const int device;
  std::mutex mutex;
  std::shared_ptr<Moment> last;  // null: never recorded
  bool captured = false;         // recorded last in a captured stream
};

Handles<cuda::Event, Event>& Events() {
  static auto& events = *new Handles<cuda::Event, Event>(0x10000000);
  return events;
}

const OpenKind kOpenEvents("events", [] { return Events().size(); });

}  // namespace
}  // namespace jaxcomm::fake

namespace jaxcomm::cuda {

Result cuStreamCreateWithPriority(Stream* stream, unsigned, int) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuStreamCreateWithPriority");
  const int device = fake::CurrentDevice();
  if (device == fake::kNoDevice) return kInvalidContext;
  *stream = fake::NewStream(device);
  return kSuccess;
}

Result cuStreamDestroy_v2(Stream stream) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuStreamDestroy_v2", 0, fake::Number(stream));
  const std::shared_ptr<fake::Stream> removed = fake::Streams().Remove(stream);
  if (removed == nullptr) return kInvalidHandle;
  removed->Close();
  return kSuccess;
}

Result cuStreamQuery(Stream stream) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuStreamQuery", 0, fake::Number(stream));
  if (fake::ViolatesCapture("cuStreamQuery", stream)) return kCaptureUnsupported;
  JAXCOMM_FAKE_STREAM(found, stream);
  return found->idle() ? kSuccess : kNotReady;
}

Result cuStreamSynchronize(Stream stream) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuStreamSynchronize", 0, fake::Number(stream));
  if (fake::ViolatesCapture("cuStreamSynchronize", stream)) return kCaptureUnsupported;
  JAXCOMM_FAKE_STREAM(found, stream);
  found->Mark()->Wait();
  return fake::DeviceFailure();
}

Result cuLaunchHostFunc(Stream stream, HostFunction function, void* data) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuLaunchHostFunc", 0, fake::Number(stream));
  if (function == nullptr) return kInvalidValue;
  JAXCOMM_FAKE_STREAM(found, stream);
  found->Enqueue([function, data] {
    fake::in_host_function = true;
    function(data);
    fake::in_host_function = false;
  });
  return kSuccess;
}

Result cuStreamIsCapturing(Stream stream, CaptureStatus* status) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuStreamIsCapturing", 0, fake::Number(stream));
  *status = fake::IsCapturing(stream) ? kCaptureActive : kCaptureNone;
  return kSuccess;
}

Result cuStreamBatchMemOp_v2(Stream stream, unsigned count, MemoryOperation* operations,
                             unsigned) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuStreamBatchMemOp_v2", 0, fake::Number(stream),
                    static_cast<int64_t>(count));
  JAXCOMM_FAKE_STREAM(found, stream);
  // As in CUDA.
  if (count == 0 || count > 256) return kInvalidValue;
  for (unsigned i = 0; i < count; ++i) {
    if (operations[i].address % sizeof(uint64_t) != 0) return kInvalidValue;
  }
  // The caller's memory is its own again once this returns.
  found->Enqueue([all = std::vector<MemoryOperation>(operations, operations + count)] {
    for (const MemoryOperation& each : all) {
      auto* const word = reinterpret_cast<uint64_t*>(each.address);
      if (each.kind == MemoryOperation::kWrite) {
        __atomic_store_n(word, each.value, __ATOMIC_RELEASE);
        continue;
      }
      while (static_cast<int64_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) -
                                  each.value) < 0 &&
             fake::DeviceFailure() == kSuccess) {
        std::this_thread::sleep_for(fake::kLook);
      }
    }
  });
  return kSuccess;
}

Result cuEventCreate(Event* event, unsigned) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuEventCreate");
  const int device = fake::CurrentDevice();
  if (device == fake::kNoDevice) return kInvalidContext;
  *event = fake::Events().Add(std::make_shared<fake::Event>(device));
  return kSuccess;
}

Result cuEventDestroy_v2(Event event) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuEventDestroy_v2");
  return fake::Events().Remove(event) == nullptr ? kInvalidHandle : kSuccess;
}

Result cuEventRecord(Event event, Stream stream) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuEventRecord", 0, fake::Number(stream));
  const auto found = fake::Events().Find(event);
  const auto on = fake::FindStream(stream, fake::CurrentDevice());
  if (found == nullptr || on == nullptr || on->device() != found->device) {
    fake::Misuse("an event or a stream of another device, or none");
    return kInvalidHandle;
  }
  const auto mark = on->Mark();  // may wait
  std::lock_guard<std::mutex> lock(found->mutex);
  found->last = mark;
  found->captured = fake::IsCapturing(stream);
  return kSuccess;
}

Result cuEventQuery(Event event) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuEventQuery", 0, -1, fake::Number(event));
  const auto found = fake::Events().Find(event);
  if (found == nullptr) return kInvalidHandle;
  std::lock_guard<std::mutex> lock(found->mutex);
  if (found->captured) return kCapturedEvent;
  return found->last == nullptr || found->last->passed() ? kSuccess : kNotReady;
}

Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuStreamWaitEvent", 0, fake::Number(stream));
  const auto found = fake::Events().Find(event);
  const auto waiting = fake::FindStream(stream, fake::CurrentDevice());
  if (found == nullptr || waiting == nullptr) return kInvalidHandle;
  std::shared_ptr<fake::Moment> last;
  {
    std::lock_guard<std::mutex> lock(found->mutex);
    last = found->last;
  }
  if (last != nullptr) waiting->WaitFor(last);
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
