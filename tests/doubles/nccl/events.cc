// Events: each remembers its last record, a moment of a stream.
#include <memory>
#include <mutex>

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/capture.h"
#include "tests/doubles/nccl/contexts.h"
#include "tests/doubles/nccl/handles.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {
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

}  // namespace
}  // namespace jaxcomm::fake

namespace jaxcomm::cuda {

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
