#include "ffi/core/watchdog.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "ffi/core/last_resort.h"
#include "ffi/os/mutex.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

// Between two passes over all. A call that finds the watchdog awake need not wake it.
constexpr auto kPause = std::chrono::milliseconds(5);

constexpr auto kMostSleep = std::chrono::seconds(1);

// Whether this is the watchdog's thread.
thread_local bool is_watchdog = false;

// How long Unwatch() waits for a poll in progress.
constexpr auto kPatience = std::chrono::seconds(10);

class Watchdog {
 public:
  // Never destroyed: its thread runs as long as the process.
  static Watchdog& Get() {
    static Watchdog* const watchdog = new Watchdog;
    return *watchdog;
  }

  Status Add(const std::shared_ptr<Watched>& watched, double period_seconds) {
    MutexLock lock(mutex_);
    RETURN_IF_ERROR(thread_.Start([this] { Run(); }, "jaxcomm-watch"));
    items_.push_back({watched.get(), watched,
                      std::chrono::duration_cast<Clock::duration>(
                          std::chrono::duration<double>(period_seconds))});
    return OkStatus();
  }

  void Remove(const Watched* watched) {
    MutexLock lock(mutex_);
    items_.erase(
        std::remove_if(items_.begin(), items_.end(),
                       [&](const Item& item) { return item.which == watched; }),
        items_.end());
    polled_.WaitFor(mutex_, kPatience,
                    [&]() REQUIRES(mutex_) { return polling_ != watched; });
  }

  void Wake() {
    // The watchdog is nearly always awake.
    if (awake_.load(std::memory_order_seq_cst)) return;
    MutexLock lock(mutex_);
    awake_.store(true);
    wake_.NotifyOne();
  }

 private:
  struct Item {
    const Watched* which;
    std::weak_ptr<Watched> watched;
    Clock::duration period;
    bool is_active = false;  // else only Wake() makes it due
    Clock::time_point due{};
  };

  void Run() {
    is_watchdog = true;
    while (true) {
      {
        MutexLock lock(mutex_);
        Clock::duration sleep = kMostSleep;
        for (const Item& item : items_) {
          if (item.is_active) sleep = std::min(sleep, item.due - Clock::now());
        }
        wake_.WaitFor(mutex_, sleep, [this] { return awake_.load(); });
        const Clock::time_point now = Clock::now();
        if (awake_.exchange(false)) {
          for (Item& item : items_) {
            if (item.is_active) continue;
            item.is_active = true;
            item.due = now;
          }
        }
        PollDue(now);
      }
      std::this_thread::sleep_for(kPause);
    }
  }

  // Unlocks around each poll. Items may be added and removed meanwhile; one that is
  // skipped for that stays due.
  void PollDue(Clock::time_point now) REQUIRES(mutex_) {
    for (size_t i = 0; i < items_.size(); ++i) {
      if (!items_[i].is_active || items_[i].due > now) continue;
      std::shared_ptr<Watched> watched = items_[i].watched.lock();
      if (watched == nullptr) {
        items_.erase(items_.begin() + static_cast<ptrdiff_t>(i--));
        continue;
      }
      items_[i].due = now + items_[i].period;
      // Before the poll: a wake in its course is not lost.
      items_[i].is_active = false;
      polling_ = watched.get();
      mutex_.unlock();
      bool again;
      {
        std::optional<LastResort> end;
        const double limit = watched->poll_seconds();
        if (std::isfinite(limit)) end.emplace(limit, watched->stuck_text());
        again = watched->Poll();
      }
      // Outside the lock: this may be the last reference.
      watched = nullptr;
      mutex_.lock();
      if (again) {
        for (Item& item : items_) {
          if (item.which == polling_) item.is_active = true;
        }
      }
      polling_ = nullptr;
      polled_.NotifyAll();
    }
  }

  Mutex mutex_;
  ConditionVariable wake_, polled_;
  std::atomic<bool> awake_{false};
  BackgroundThread thread_ GUARDED_BY(mutex_);
  std::vector<Item> items_ GUARDED_BY(mutex_);
  const Watched* polling_ GUARDED_BY(mutex_) = nullptr;
};

}  // namespace

Status Watch(const std::shared_ptr<Watched>& watched, double period_seconds) {
  return Watchdog::Get().Add(watched, period_seconds);
}

void Unwatch(const Watched& watched) { Watchdog::Get().Remove(&watched); }

void WakeWatchdog() { Watchdog::Get().Wake(); }

bool IsWatchdog() { return is_watchdog; }

}  // namespace jaxcomm
