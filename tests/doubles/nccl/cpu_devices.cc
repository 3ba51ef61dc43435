// CPU devices in the place of GPUs: what the backend asks of a stand-in beyond NCCL.
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "ffi/backends/nccl/test_double.h"
#include "tests/doubles/nccl/contexts.h"
#include "tests/doubles/nccl/controls.h"
#include "tests/doubles/nccl/failed.h"
#include "tests/doubles/nccl/host_order.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {
namespace {

constexpr size_t kMostDevices = 64;

struct Orders {
  std::mutex mutex;
  std::map<const void*, std::shared_ptr<HostOrder>> of;
};

Orders& TheOrders() {
  static Orders& orders = *new Orders;
  return orders;
}

std::shared_ptr<HostOrder> OrderOf(const void* world) {
  Orders& orders = TheOrders();
  std::lock_guard<std::mutex> lock(orders.mutex);
  std::shared_ptr<HostOrder>& order = orders.of[world];
  if (order == nullptr) order = std::make_shared<HostOrder>(kMostDevices);
  return order;
}

void Arrive(const void* world, size_t member, const void* owner, int64_t run,
            uint64_t call_site, void (*issue)(void*), void* argument) {
  OrderOf(world)->Arrive(member, owner, {run, call_site},
                         [issue, argument] { issue(argument); });
}

void Abandon(const void* world, const void* owner) { OrderOf(world)->Abandon(owner); }

void Forget(const void* world) {
  Orders& orders = TheOrders();
  std::lock_guard<std::mutex> lock(orders.mutex);
  orders.of.erase(world);
}

// Runs what waited for one device. A program that goes on there may wait for other
// devices, which a stream's thread must not.
class Completer {
 public:
  static Completer& Of(int device) {
    static auto& mutex = *new std::mutex;
    static auto& known = *new std::map<int, Completer*>;
    std::lock_guard<std::mutex> lock(mutex);
    Completer*& completer = known[device];
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

void WhenDone(void* stream, void (*done)(void*, int), void* argument) {
  const auto found = FindStream(stream, kNoDevice);
  const auto call = [device = found->device(), done, argument] {
    const cuda::Result error = DeviceFailure();
    Completer::Of(device).Run([done, argument, error] { done(argument, error); });
  };
  found->Enqueue(call, call);
}

}  // namespace
}  // namespace jaxcomm::fake

const jaxcomm::TestDouble* jaxcommTestDouble() {
  static constexpr jaxcomm::TestDouble kDouble = {
      jaxcommFakeHas, jaxcomm::fake::Arrive, jaxcomm::fake::Abandon,
      jaxcomm::fake::Forget, jaxcomm::fake::WhenDone};
  return &kDouble;
}
