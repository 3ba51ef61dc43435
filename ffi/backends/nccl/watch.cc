#include "ffi/backends/nccl/watch.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxcomm {
namespace {

// Operations take from ten microseconds on; who waits for a record of them is a person.
constexpr auto kPoll = std::chrono::milliseconds(5);

class Watcher {
 public:
  // Never destroyed: its thread runs as long as the process.
  static Watcher& Get() {
    static Watcher* const watcher = new Watcher;
    return *watcher;
  }

  void Add(std::weak_ptr<Watched> watched) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back(std::move(watched));
    if (started_) return;
    started_ = true;
    std::thread([this] { Run(); }).detach();
  }

  void Wake() {
    // Nearly always it is awake, and this is all.
    if (awake_.load(std::memory_order_seq_cst)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    awake_.store(true);
    wake_.notify_one();
  }

 private:
  void Run() {
    while (true) {
      std::vector<std::shared_ptr<Watched>> all;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return awake_.load(); });
        awake_.store(false);
        for (size_t i = 0; i < watched_.size();) {
          if (auto watched = watched_[i].lock()) {
            all.push_back(std::move(watched));
            ++i;
          } else {
            watched_.erase(watched_.begin() + static_cast<ptrdiff_t>(i));
          }
        }
      }
      bool more = false;
      for (auto& watched : all) more = watched->Poll() || more;
      all.clear();
      if (more) Wake();
      std::this_thread::sleep_for(kPoll);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> awake_{false};
  bool started_ = false;
  std::vector<std::weak_ptr<Watched>> watched_;
};

}  // namespace

void Watch(std::weak_ptr<Watched> watched) { Watcher::Get().Add(std::move(watched)); }

void WakeWatch() { Watcher::Get().Wake(); }

}  // namespace jaxcomm
