#include "ffi/backends/host/local/continuer.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <thread>

#include "ffi/os/cores.h"
#include "ffi/os/mutex.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

// An idle thread spins this long before it sleeps: being woken takes as long as a small
// collective.
constexpr auto kSpin = std::chrono::microseconds(30);
// After a program that ran this long before its next wait, a second thread shares the
// rest.
constexpr auto kLong = std::chrono::microseconds(40);
// A thread whose program runs this long may be blocked. Other threads take the programs
// that are queued behind it.
constexpr auto kStalled = std::chrono::milliseconds(2);
// How long after the last work the watch for stalled threads goes on.
constexpr auto kWatch = std::chrono::seconds(1);

class Continuer {
 public:
  // Never destroyed, its threads never joined: they may be inside a program of
  // XLA's when the process exits.
  static Continuer& Get() {
    static Continuer* const continuer = new Continuer;
    return *continuer;
  }

  Status Start() {
    MutexLock lock(mutex_);
    return StartLocked();
  }

  void Add(std::vector<Continuation> continuations, const std::shared_ptr<Pace>& pace) {
    const int count = static_cast<int>(continuations.size());
    if (count == 0) return;
    MutexLock lock(mutex_);
    (void)StartLocked();  // has succeeded before, in StartContinuing()
    for (Continuation& continuation : continuations) {
      queue_.push_back({std::move(continuation), pace});
    }
    queued_.store(static_cast<int>(queue_.size()), std::memory_order_release);
    const bool stall = pace != nullptr && pace->stalls.load(std::memory_order_relaxed);
    // To wake a thread costs as much as a small collective. A worker in whose program
    // the last rank came is back for the others soon, unless programs are long here.
    // Few ranks want a thread each.
    const bool is_back_soon = is_worker_ && count > 2 * Cores() && pace != nullptr &&
                              !pace->is_long.load(std::memory_order_relaxed);
    Recruit(stall ? count : is_back_soon ? 0 : 1);
    last_work_ = Clock::now();
    if (!watching_) {
      watching_ = true;
      watch_wake_.NotifyOne();
    }
  }

 private:
  struct Item {
    Continuation continuation;
    std::shared_ptr<Pace> pace;  // or null
  };

  struct Worker {
    Clock::time_point since;
    bool is_running = false;
    std::shared_ptr<Pace> pace;  // of what it runs
  };

  // Wakes or starts threads for up to `count` of the queued programs. A thread that was
  // woken but has not run yet counts: if other programs have the cores, a second thread
  // would be no faster. So there are never more threads than waiting ranks. If the
  // system refuses a thread, WatchForStalls() tries again.
  void Recruit(int count) REQUIRES(mutex_) {
    const int wanted = std::min(count, static_cast<int>(queue_.size()));
    const int on_their_way =
        static_cast<int>(workers_.size()) - running_ - (sleeping_ - waking_);
    for (int i = on_their_way; i < wanted; ++i) {
      if (sleeping_ > waking_) {
        ++waking_;
        wake_.NotifyOne();
      } else if (StartWorker().failure()) {
        return;
      }
    }
  }

  Status StartWorker() REQUIRES(mutex_) {
    auto worker = std::make_unique<Worker>();
    RETURN_IF_ERROR(
        StartDetached([this, worker = worker.get()] { Work(worker); }, "jaxcomm-run"));
    workers_.push_back(std::move(worker));
    return OkStatus();
  }

  Status StartLocked() REQUIRES(mutex_) {
    RETURN_IF_ERROR(watch_.Start([this] { WatchForStalls(); }, "jaxcomm-stalls"));
    return workers_.empty() ? StartWorker() : OkStatus();
  }

  // The queue must not be empty.
  Item TakeItem() REQUIRES(mutex_) {
    Item item = std::move(queue_.front());
    queue_.pop_front();
    queued_.store(static_cast<int>(queue_.size()), std::memory_order_release);
    return item;
  }

  void Work(Worker* worker) {
    is_worker_ = true;
    MutexLock lock(mutex_);
    while (true) {
      Clock::time_point begin = Clock::now();
      while (!queue_.empty()) {
        Item item = TakeItem();
        worker->since = begin;
        worker->pace = std::move(item.pace);
        worker->is_running = true;
        ++running_;
        lock.Unlock();
        CompleteHere(std::move(item.continuation));
        const Clock::time_point end = Clock::now();
        const bool was_long = end - begin > kLong;
        begin = end;
        if (worker->pace != nullptr) {
          worker->pace->is_long.store(was_long, std::memory_order_relaxed);
        }
        lock.Lock();
        worker->is_running = false;
        --running_;
        last_work_ = end;
        // This thread takes the next; a second one shares the rest.
        if (was_long && queue_.size() > 1 && running_ + 1 < Cores()) Recruit(2);
      }
      lock.Unlock();
      Spin();
      lock.Lock();
      if (!queue_.empty()) continue;
      ++sleeping_;
      wake_.Wait(mutex_,
                 [this]() REQUIRES(mutex_) { return !queue_.empty() || waking_ > 0; });
      --sleeping_;
      if (waking_ > 0) --waking_;
    }
  }

  // Returns when there is work or it gave up. One thread at a time: the core it
  // takes is worth more to the programs.
  void Spin() {
    if (Cores() < 2) return;
    int none = 0;
    if (!spinning_.compare_exchange_strong(none, 1, std::memory_order_relaxed)) return;
    const Clock::time_point end = Clock::now() + kSpin;
    for (int i = 1; queued_.load(std::memory_order_acquire) == 0; ++i) {
      Pause();
      if (i % 16 != 0) continue;
      if (Clock::now() >= end) break;
      if (i % 64 == 0) std::this_thread::yield();
    }
    spinning_.store(0, std::memory_order_relaxed);
  }

  void WatchForStalls() {
    MutexLock lock(mutex_);
    while (true) {
      watch_wake_.Wait(mutex_, [this]() REQUIRES(mutex_) { return watching_; });
      watch_wake_.WaitFor(mutex_, kStalled);
      const Clock::time_point now = Clock::now();
      if (!queue_.empty()) {
        bool stalled = false;
        for (const auto& worker : workers_) {
          if (!worker->is_running || now - worker->since < kStalled) continue;
          if (worker->pace != nullptr) {
            worker->pace->stalls.store(true, std::memory_order_relaxed);
          }
          stalled = true;
        }
        if (stalled || running_ == 0) {
          // A thread that was woken may have slept on: before 2.41 glibc can lose a
          // notification where several threads wait (its bug 25847).
          if (waking_ > 0) wake_.NotifyOne();
          const size_t before = workers_.size();
          Recruit(static_cast<int>(queue_.size()));
          const bool is_refused = workers_.size() == before && sleeping_ == 0 &&
                                  static_cast<int>(before) == running_;
          // All threads may be blocked, and the system starts no more: this thread is
          // the last that can help.
          if (is_refused) {
            Item item = TakeItem();
            lock.Unlock();
            CompleteHere(std::move(item.continuation));
            lock.Lock();
          }
        }
      }
      if (queue_.empty() && now - last_work_ > kWatch) watching_ = false;
    }
  }

  static thread_local bool is_worker_;  // this thread

  Mutex mutex_;
  ConditionVariable wake_;
  std::deque<Item> queue_ GUARDED_BY(mutex_);
  std::atomic<int> queued_{0};
  std::atomic<int> spinning_{0};
  int running_ GUARDED_BY(mutex_) = 0;
  int sleeping_ GUARDED_BY(mutex_) = 0;
  int waking_ GUARDED_BY(mutex_) = 0;  // the sleeping ones that were notified
  std::vector<std::unique_ptr<Worker>> workers_ GUARDED_BY(mutex_);

  ConditionVariable watch_wake_;
  BackgroundThread watch_ GUARDED_BY(mutex_);
  bool watching_ GUARDED_BY(mutex_) = false;
  Clock::time_point last_work_ GUARDED_BY(mutex_);
};

thread_local bool Continuer::is_worker_ = false;

}  // namespace

void CompleteHere(Continuation continuation) {
  if (continuation.status.success()) {
    continuation.promise.SetAvailable();
  } else {
    continuation.promise.SetError(std::move(continuation.status));
  }
}

void Continue(std::vector<Continuation> continuations, std::shared_ptr<Pace> pace) {
  Continuer::Get().Add(std::move(continuations), pace);
}

Status StartContinuing() { return Continuer::Get().Start(); }

}  // namespace jaxcomm
