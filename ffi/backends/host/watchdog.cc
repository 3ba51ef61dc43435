#include "ffi/backends/host/watchdog.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/host/local.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

class Watchdog {
 public:
  // Never destroyed, its thread never joined: it may be asleep when the process
  // exits, and touches nothing that exit tears down.
  static Watchdog& Get() {
    static Watchdog* const watchdog = new Watchdog;
    return *watchdog;
  }

  Status Watch(std::weak_ptr<LocalCommunicator> communicator, double timeout_seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      std::thread thread;
      RETURN_IF_ERROR(StartThread([this] { Run(); }, &thread));
      thread.detach();
      started_ = true;
    }
    watched_.push_back(std::move(communicator));
    // A deadline is noticed at most a tenth of its length late.
    const double tick = std::clamp(timeout_seconds / 10, 0.01, 1.0);
    tick_ = std::min(tick_, std::chrono::duration<double>(tick));
    wake_.notify_one();
    return OkStatus();
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (watched_.empty()) {
        tick_ = std::chrono::duration<double>(1.0);
        wake_.wait(lock);
      } else {
        wake_.wait_for(lock, tick_);
      }
      std::vector<std::shared_ptr<LocalCommunicator>> live;
      for (auto it = watched_.begin(); it != watched_.end();) {
        if (auto communicator = it->lock()) {
          live.push_back(std::move(communicator));
          ++it;
        } else {
          it = watched_.erase(it);
        }
      }
      lock.unlock();
      const Clock::time_point now = Clock::now();
      for (const auto& communicator : live) communicator->ExpireBefore(now);
      live.clear();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::weak_ptr<LocalCommunicator>> watched_;
  std::chrono::duration<double> tick_{1.0};
  bool started_ = false;
};

}  // namespace

Status WatchDeadlines(std::weak_ptr<LocalCommunicator> communicator,
                      double timeout_seconds) {
  return Watchdog::Get().Watch(std::move(communicator), timeout_seconds);
}

}  // namespace jaxcomm
