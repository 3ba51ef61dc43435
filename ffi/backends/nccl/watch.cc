#include "ffi/backends/nccl/watch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "ffi/backends/nccl/last_resort.h"

namespace jaxcomm {
namespace {

// Operations take from ten microseconds on; who waits for a record of them is a person.
constexpr auto kPoll = std::chrono::milliseconds(5);

// How long Unwatch() waits for a poll in progress.
constexpr auto kPatience = std::chrono::seconds(10);

constexpr char kStuck[] =
    "the thread that watches over collectives does not get an answer of the CUDA "
    "driver, and cannot end what hangs";

class Watcher {
 public:
  // Never destroyed: its thread runs as long as the process.
  static Watcher& Get() {
    static Watcher* const watcher = new Watcher;
    return *watcher;
  }

  void Add(const std::shared_ptr<Watched>& watched) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back({watched.get(), watched});
    if (started_) return;
    started_ = true;
    std::thread([this] { Run(); }).detach();
  }

  void Remove(const Watched* watched) {
    std::unique_lock<std::mutex> lock(mutex_);
    watched_.erase(
        std::remove_if(watched_.begin(), watched_.end(),
                       [&](const Item& item) { return item.which == watched; }),
        watched_.end());
    // A pass that is under way may leave out the one behind it.
    awake_.store(true);
    wake_.notify_one();
    polled_.wait_for(lock, kPatience, [&] { return polling_ != watched; });
  }

  void Wake() {
    // Nearly always it is awake, and this is all.
    if (awake_.load(std::memory_order_seq_cst)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    awake_.store(true);
    wake_.notify_one();
  }

 private:
  struct Item {
    const Watched* which;
    std::weak_ptr<Watched> watched;
  };

  void Run() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return awake_.load(); });
      awake_.store(false);
      bool more = false;
      for (size_t i = 0; i < watched_.size();) {
        // One at a time, so that the others may go meanwhile.
        std::shared_ptr<Watched> watched = watched_[i].watched.lock();
        if (watched == nullptr) {
          watched_.erase(watched_.begin() + static_cast<ptrdiff_t>(i));
          continue;
        }
        polling_ = watched.get();
        lock.unlock();
        {
          const LastResort end(watched->poll_seconds(), kStuck);
          more = watched->Poll() || more;
        }
        watched = nullptr;
        lock.lock();
        polling_ = nullptr;
        polled_.notify_all();
        ++i;
      }
      lock.unlock();
      if (more) Wake();
      std::this_thread::sleep_for(kPoll);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, polled_;
  std::atomic<bool> awake_{false};
  bool started_ = false;
  std::vector<Item> watched_;
  const Watched* polling_ = nullptr;
};

}  // namespace

void Watch(const std::shared_ptr<Watched>& watched) { Watcher::Get().Add(watched); }

void Unwatch(const Watched& watched) { Watcher::Get().Remove(&watched); }

void WakeWatch() { Watcher::Get().Wake(); }

}  // namespace jaxcomm
