// XLA:GPU, played for CPU devices: calls the backend's handlers for GPUs as XLA does,
// each device with a stream of its own.
//
// XLA:CPU takes what OnCpu() returns for a handler of its own. A call is given to the
// handler of GPUs when it is its turn, and ends for XLA:CPU once the stream has come so
// far. XLA:GPU runs a program's calls in one order on every device, which NCCL relies
// on. XLA:CPU does not where calls are independent. So in each run the first device to
// come to a call leads, and the others hold calls back until it has come to them: since
// it came to them in this order, none of them can depend on a later one.
#include "xla/ffi/api/c_api.h"

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/doubles/nccl/controls.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/failed.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {
namespace {

// XLA numbers the CPU devices of process p from 2048 p on.
constexpr int kMostDevices = 2048;

std::atomic<XLA_FFI_Handler*> handler_of_gpus{nullptr};
std::atomic<const XLA_FFI_TypeId*> type_of_state{nullptr};

template <typename Args>
Args ArgsOf(XLA_FFI_ExecutionContext* context = nullptr) {
  Args args = {};
  args.struct_size = sizeof(Args);
  if constexpr (!std::is_same_v<Args, XLA_FFI_Future_Create_Args>) args.ctx = context;
  return args;
}

cuda::Stream StreamOfXla(int device) {
  Locked<std::map<int, cuda::Stream>> streams;
  cuda::Stream& stream = streams->operator[](device);
  if (stream == nullptr) stream = NewStream(device);
  return stream;
}

// A call of XLA:CPU's, which keeps the buffers until its future ends.
class XlaCall {
 public:
  // Null if it could be read.
  XLA_FFI_Error* Read(XLA_FFI_CallFrame* frame) {
    xla_ = frame->api;
    auto run = ArgsOf<XLA_FFI_RunId_Get_Args>(frame->ctx);
    if (auto* error = xla_->XLA_FFI_RunId_Get(&run)) return error;
    run_ = run.run_id;
    auto ordinal = ArgsOf<XLA_FFI_DeviceOrdinal_Get_Args>(frame->ctx);
    if (auto* error = xla_->XLA_FFI_DeviceOrdinal_Get(&ordinal)) return error;
    device_ = ordinal.device_ordinal % kMostDevices;
    auto state = ArgsOf<XLA_FFI_State_Get_Args>(frame->ctx);
    state.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
    state.type_id = const_cast<XLA_FFI_TypeId*>(type_of_state.load());
    if (auto* error = xla_->XLA_FFI_State_Get(&state)) return error;
    state_ = state.state;
    auto future = ArgsOf<XLA_FFI_Future_Create_Args>();
    if (auto* error = xla_->XLA_FFI_Future_Create(&future)) return error;
    future_ = frame->future = future.future;
    frame_ = *frame;
    Keep(frame->args.size, frame->args.types, frame->args.args, &arg_types_, &args_);
    Keep(frame->rets.size, frame->rets.types, frame->rets.rets, &ret_types_, &rets_);
    frame_.args.types = arg_types_.data();
    frame_.args.args = args_.data();
    frame_.rets.types = ret_types_.data();
    frame_.rets.rets = rets_.data();
    return nullptr;
  }

  int64_t run() const { return run_; }
  int device() const { return device_; }
  const void* state() const { return state_; }

  // Calls the handler of GPUs, on a thread that may wait for other ranks there.
  // Returns its error.
  XLA_FFI_Error* Enqueue() {
    XLA_FFI_Api gpu = *xla_;
    gpu.struct_size = sizeof(gpu);
    gpu.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) {
      args->stream = StreamOfXla(Of(args->ctx)->device_);
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    gpu.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) {
      args->run_id = Of(args->ctx)->run_;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    gpu.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) {
      args->device_ordinal = Of(args->ctx)->device_;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    gpu.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) {
      args->state = Of(args->ctx)->state_;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    frame_.extension_start = nullptr;
    frame_.api = &gpu;
    frame_.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(this);
    frame_.future = nullptr;
    return handler_of_gpus.load()(&frame_);
  }

  // Tells XLA:CPU how it ended.
  void End(XLA_FFI_Error* error) {
    if (error == nullptr) {
      XLA_FFI_Future_SetAvailable_Args args = {sizeof(args), nullptr, future_};
      xla_->XLA_FFI_Future_SetAvailable(&args);
    } else {
      XLA_FFI_Future_SetError_Args args = {sizeof(args), nullptr, future_, error};
      xla_->XLA_FFI_Future_SetError(&args);
    }
  }
  XLA_FFI_Error* ErrorOf(cuda::Result result) {
    const char* text = nullptr;
    cuda::cuGetErrorString(result, &text);
    const std::string message =
        "waiting for the stream: " +
        (text == nullptr ? "CUDA error " + std::to_string(static_cast<int>(result))
                         : std::string(text));
    XLA_FFI_Error_Create_Args args = {sizeof(args), nullptr, message.c_str(),
                                      XLA_FFI_Error_Code_INTERNAL};
    return xla_->XLA_FFI_Error_Create(&args);
  }

 private:
  static XlaCall* Of(XLA_FFI_ExecutionContext* context) {
    return reinterpret_cast<XlaCall*>(context);
  }

  template <typename Type>
  void Keep(int64_t size, const Type* types, void* const* buffers,
            std::vector<Type>* kept_types, std::vector<void*>* kept) {
    kept_types->assign(types, types + size);
    for (int64_t i = 0; i < size; ++i) {
      XLA_FFI_Buffer buffer = *static_cast<const XLA_FFI_Buffer*>(buffers[i]);
      dims_.emplace_back(buffer.dims, buffer.dims + buffer.rank);
      buffer.dims = dims_.back().data();
      buffers_.push_back(buffer);
      kept->push_back(&buffers_.back());
    }
  }

  const XLA_FFI_Api* xla_ = nullptr;
  int64_t run_ = 0;
  int device_ = 0;
  void* state_ = nullptr;
  XLA_FFI_Future* future_ = nullptr;
  XLA_FFI_CallFrame frame_ = {};
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
  std::vector<void*> args_, rets_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::deque<std::vector<int64_t>> dims_;
};

// Runs what waited for one device. A program that goes on there may wait for other
// devices, which a stream's thread must not.
class Completer {
 public:
  static Completer& Of(int device) {
    Locked<std::map<int, Completer*>> known;
    Completer*& completer = known->operator[](device);
    if (completer == nullptr) completer = new Completer;
    return *completer;
  }

  void Run(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    if (queue_.size() > idle_) {
      ++idle_;
      std::thread([this] { Loop(); }).detach();
    }
    changed_.notify_one();
  }

 private:
  // Of as many threads as have work that waits at once.
  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      --idle_;
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
      ++idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0;  // threads that wait for work, or are about to
};

// The calls of one run of a program.
class Run : public std::enable_shared_from_this<Run> {
 public:
  static std::shared_ptr<Run> Of(int64_t id) {
    // Long after the last call of a run, its order is forgotten.
    constexpr size_t kMostRuns = 256;
    struct Runs {
      std::map<int64_t, std::shared_ptr<Run>> of;
      std::deque<int64_t> ids;
    };
    Locked<Runs> runs;
    std::shared_ptr<Run>& run = runs->of[id];
    if (run != nullptr) return run;
    run = std::make_shared<Run>();
    runs->ids.push_back(id);
    std::shared_ptr<Run> found = run;
    if (runs->ids.size() > kMostRuns) {
      runs->of.erase(runs->ids.front());
      runs->ids.pop_front();
    }
    return found;
  }

  // Has a call given to its device's stream when it is its turn.
  void Arrive(std::shared_ptr<XlaCall> call) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (leader_ < 0) leader_ = call->device();
    if (call->device() == leader_) order_.push_back(call->state());
    members_[call->device()].held.push_back(
        {std::move(call), ended_communicators.load()});
    for (auto& [device, member] : members_) Issue(member);
    if (!HoldsAny() || std::exchange(has_looker_, true)) return;
    std::thread([self = shared_from_this()] { self->LookForLost(); }).detach();
  }

 private:
  struct Held {
    std::shared_ptr<XlaCall> call;
    uint64_t endings;  // before
  };

  struct Member {
    size_t next = 0;  // in order_
    std::deque<Held> held;
    std::deque<std::shared_ptr<XlaCall>> issued;
    bool has_thread = false;
  };

  bool HoldsAny() const {
    for (const auto& [device, member] : members_) {
      if (!member.held.empty()) return true;
    }
    return false;
  }

  // Where a call failed the leader may never come to others, and each is to fail or to
  // hang by itself. The same once a communicator has ended.
  void LookForLost() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (HoldsAny()) {
      for (auto& [device, member] : members_) {
        for (const Held& held : member.held) {
          if (held.endings != ended_communicators.load()) has_failed_ = true;
        }
        for (; has_failed_ && !member.held.empty(); member.held.pop_front()) {
          Give(member, std::move(member.held.front().call));
        }
      }
      lock.unlock();
      std::this_thread::sleep_for(kLook);
      lock.lock();
    }
    has_looker_ = false;
  }

  void Issue(Member& member) {
    bool found = true;
    while (found && member.next < order_.size()) {
      found = false;
      for (size_t i = 0; i < member.held.size(); ++i) {
        if (member.held[i].call->state() != order_[member.next]) continue;
        Give(member, std::move(member.held[i].call));
        member.held.erase(member.held.begin() + static_cast<ptrdiff_t>(i));
        ++member.next;
        found = true;
        break;
      }
    }
  }

  void Give(Member& member, std::shared_ptr<XlaCall> call) {
    member.issued.push_back(std::move(call));
    if (std::exchange(member.has_thread, true)) return;
    std::thread([self = shared_from_this(), &member] {
      std::unique_lock<std::mutex> lock(self->mutex_);
      while (!member.issued.empty()) {
        std::shared_ptr<XlaCall> next = std::move(member.issued.front());
        member.issued.pop_front();
        lock.unlock();
        self->Enqueue(std::move(next));
        lock.lock();
      }
      member.has_thread = false;
    }).detach();
  }

  void Enqueue(std::shared_ptr<XlaCall> call) {
    if (XLA_FFI_Error* const error = call->Enqueue()) {
      has_failed_ = true;
      return call->End(error);
    }
    const int device = call->device();
    // Also where what ran was aborted: XLA:GPU hears nothing of that.
    const auto passed = [self = shared_from_this(), device, call = std::move(call)] {
      const cuda::Result result = DeviceFailure();
      if (result != cuda::kSuccess) self->has_failed_ = true;
      Completer::Of(device).Run([call, result] {
        call->End(result == cuda::kSuccess ? nullptr : call->ErrorOf(result));
      });
    };
    FindStream(StreamOfXla(device), kNoDevice)->Enqueue(passed, passed);
  }

  std::mutex mutex_;
  int leader_ = -1;
  std::vector<const void*> order_;
  std::map<int, Member> members_;
  bool has_looker_ = false;
  std::atomic<bool> has_failed_{false};
};

XLA_FFI_Error* OnCpu(XLA_FFI_CallFrame* frame) {
  const bool asks_for_metadata = frame->extension_start != nullptr;
  if (asks_for_metadata) return handler_of_gpus.load()(frame);
  auto call = std::make_shared<XlaCall>();
  if (XLA_FFI_Error* const error = call->Read(frame)) return error;
  Run::Of(call->run())->Arrive(std::move(call));
  return nullptr;
}

}  // namespace
}  // namespace jaxcomm::fake

void* jaxcommFakeXla(void* handler, const void* type_id) {
  using namespace jaxcomm::fake;  // NOLINT: an exported function cannot live there
  handler_of_gpus = reinterpret_cast<XLA_FFI_Handler*>(handler);
  type_of_state = static_cast<const XLA_FFI_TypeId*>(type_id);
  return reinterpret_cast<void*>(&OnCpu);
}
