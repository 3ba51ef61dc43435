// Streams: each a thread that runs what is enqueued, one after the other. A stream
// takes 1024 things: who enqueues more waits, as in CUDA. A device that has failed runs
// nothing any more (failed.h). Some pretend to be captured into a graph.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_STREAMS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_STREAMS_H_

#include <condition_variable>
#include <deque>
#include <functional>

#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/exports.h"

namespace jaxcomm::fake {

// A point of a stream's work that others can wait for.
class Moment {
 public:
  void Pass();
  // Also returns when the devices have failed.
  void Wait();
  bool passed();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
};

class Stream {
 public:
  // The thread ends when the stream was closed and has run everything.
  static std::shared_ptr<Stream> Start(int device);

  // `dropped` is called in place of `work` if the devices have failed by then.
  void Enqueue(std::function<void()> work, std::function<void()> dropped = nullptr);
  // Everything enqueued so far will have run when the moment passes.
  std::shared_ptr<Moment> Mark();
  void WaitFor(std::shared_ptr<Moment> moment);
  bool idle();
  void Close();
  int device() const { return device_; }

 private:
  explicit Stream(int device) : device_(device) {}
  void Run();

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  struct Work {
    std::function<void()> run, dropped;
  };
  std::condition_variable taken_;
  std::deque<Work> queue_;
  bool busy_ = false;
  bool closed_ = false;
};

// Makes a stream of a device, without a trace.
cuda::Stream NewStream(int device);

// Waits until nothing runs on any stream of the device, as CUDA does before it frees
// memory; or until the devices have failed.
void WaitForDevice(int device);

// The stream of a handle; null if there is none. A null handle, and the special ones 1
// and 2 of CUDA, name the default stream of `device`. Unlike CUDA's it waits for no
// other stream, and none for it.
std::shared_ptr<Stream> FindStream(cuda::Stream stream, int device);

// Finds a stream of the current device, in a function that fails without it.
#define JAXCOMM_FAKE_STREAM(name, stream)                                    \
  const auto name =                                                          \
      ::jaxcomm::fake::FindStream(stream, ::jaxcomm::fake::CurrentDevice()); \
  if (name == nullptr) return kInvalidHandle

bool IsCapturing(cuda::Stream stream);

// Whether the calling thread captures any stream.
bool CapturesHere();

// The number of the graph that is captured last, or now; and whether it has ended.
uint64_t LastGraph();
bool HasEnded(uint64_t graph);

// Whether `stream` is captured; if so the trace says that `function` broke the rule.
bool ViolatesCapture(const char* function, cuda::Stream stream);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_STREAMS_H_
