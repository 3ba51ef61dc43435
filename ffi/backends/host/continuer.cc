#include "ffi/backends/host/continuer.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "ffi/os/cores.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

// An idle thread looks out for work this long before it sleeps: being woken takes
// as long as a small collective.
constexpr auto kSpin = std::chrono::microseconds(30);
// A program that ran this long before its next wait is worth a second thread,
constexpr auto kLong = std::chrono::microseconds(40);
// and so are those behind the same call site until as many in a row were shorter.
constexpr int kShortInARow = 64;
// A thread that has not come back after this long may be blocked: what is queued
// behind it goes to others.
constexpr auto kStalled = std::chrono::milliseconds(2);
// How long after the last work the look-out for stalled threads goes on.
constexpr auto kLookout = std::chrono::seconds(1);

// Whether this thread is one of the Continuer's.
thread_local bool on_worker = false;

class Continuer {
 public:
  // Never destroyed, its threads never joined: they may be inside a program of
  // XLA's when the process exits.
  static Continuer& Get() {
    static Continuer* const continuer = new Continuer;
    return *continuer;
  }

  Status Start() {
    std::lock_guard<std::mutex> lock(mutex_);
    return StartLocked();
  }

  void Add(std::vector<Continuation> continuations, const std::shared_ptr<Gap>& gap) {
    const int count = static_cast<int>(continuations.size());
    if (count == 0) return;
    // A worker in whose program the last rank arrived is back for the others sooner
    // than another one wakes, unless the program goes on for long first. Few ranks look
    // out for each other, and want a thread each.
    const bool back_soon = on_worker && count > 2 * Cores() &&
                           gap->long_runs.load(std::memory_order_relaxed) == 0;
    int wanted = back_soon ? 0 : 1;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      (void)StartLocked();  // has succeeded before, for who makes communicators
      for (Continuation& continuation : continuations) {
        queue_.push_back({std::move(continuation), gap});
      }
      queued_.store(static_cast<int>(queue_.size()), std::memory_order_release);
      if (gap->stalls.load(std::memory_order_relaxed)) wanted = count;
      Recruit(wanted);
      last_work_ = Clock::now();
      if (!looking_out_) {
        looking_out_ = true;
        lookout_wake_.notify_one();
      }
    }
  }

 private:
  struct Item {
    Continuation continuation;
    std::shared_ptr<Gap> gap;
  };

  struct Worker {
    Clock::time_point since;
    std::shared_ptr<Gap> gap;  // of what it runs; null while it runs nothing
  };

  // Sees to it that up to `count` of the queued programs find a thread. A thread that
  // was woken or started but has not run yet counts: with the cores taken by others it
  // may be long on its way, and a second one would be no faster. So there are never
  // more threads than ranks that wait. If the system refuses a thread, the look-out
  // tries again. Requires mutex_.
  void Recruit(int count) {
    const int wanted = std::min(count, static_cast<int>(queue_.size()));
    const int on_their_way =
        static_cast<int>(workers_.size()) - running_ - (sleeping_ - waking_);
    for (int i = on_their_way; i < wanted; ++i) {
      if (sleeping_ > waking_) {
        ++waking_;
        wake_.notify_one();
      } else if (StartWorker().failure()) {
        return;
      }
    }
  }

  // Requires mutex_.
  Status StartWorker() {
    auto worker = std::make_unique<Worker>();
    std::thread thread;
    Status status =
        StartThread([this, worker = worker.get()] { Work(worker); }, &thread);
    if (status.failure()) return status;
    thread.detach();
    workers_.push_back(std::move(worker));
    return OkStatus();
  }

  // Requires mutex_.
  Status StartLocked() {
    if (!lookout_started_) {
      std::thread thread;
      RETURN_IF_ERROR(StartThread([this] { LookOut(); }, &thread));
      thread.detach();
      lookout_started_ = true;
    }
    return workers_.empty() ? StartWorker() : OkStatus();
  }

  // Requires mutex_, and that the queue is not empty.
  Item TakeItem() {
    Item item = std::move(queue_.front());
    queue_.pop_front();
    queued_.store(static_cast<int>(queue_.size()), std::memory_order_release);
    return item;
  }

  // Runs the program that waits for the promise, up to its next wait.
  static void Complete(Continuation continuation) {
    if (continuation.status.success()) {
      continuation.promise.SetAvailable();
    } else {
      continuation.promise.SetError(std::move(continuation.status));
    }
  }

  void Work(Worker* worker) {
    on_worker = true;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      while (!queue_.empty()) {
        Item item = TakeItem();
        const Clock::time_point begin = Clock::now();
        worker->since = begin;
        worker->gap = item.gap;
        ++running_;
        lock.unlock();
        Complete(std::move(item.continuation));
        const bool was_long = Clock::now() - begin > kLong;
        NoteRun(*item.gap, was_long);
        lock.lock();
        worker->gap = nullptr;
        --running_;
        last_work_ = Clock::now();
        // This thread takes the next; a second one shares the rest.
        if (was_long && queue_.size() > 1 && running_ + 1 < Cores()) Recruit(2);
      }
      lock.unlock();
      Spin();
      lock.lock();
      if (!queue_.empty()) continue;
      ++sleeping_;
      wake_.wait(lock, [this] { return !queue_.empty() || waking_ > 0; });
      --sleeping_;
      if (waking_ > 0) --waking_;
    }
  }

  // Not exact where two threads are at it, and need not be.
  static void NoteRun(Gap& gap, bool was_long) {
    const int long_runs = gap.long_runs.load(std::memory_order_relaxed);
    const int next = was_long ? kShortInARow : std::max(long_runs - 1, 0);
    if (next != long_runs) gap.long_runs.store(next, std::memory_order_relaxed);
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

  void LookOut() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (!looking_out_) lookout_wake_.wait(lock, [this] { return looking_out_; });
      lookout_wake_.wait_for(lock, kStalled);
      const Clock::time_point now = Clock::now();
      if (!queue_.empty()) {
        bool stalled = false;
        for (const auto& worker : workers_) {
          if (worker->gap == nullptr || now - worker->since < kStalled) continue;
          worker->gap->stalls.store(true, std::memory_order_relaxed);
          stalled = true;
        }
        // Also when nobody runs: a thread that was woken may have slept on.
        if (stalled || running_ == 0) {
          const size_t before = workers_.size();
          Recruit(static_cast<int>(queue_.size()));
          const bool is_refused = workers_.size() == before && sleeping_ == 0 &&
                                  static_cast<int>(before) == running_;
          // All threads may be blocked, and the system starts no more: this thread is
          // the last that can help.
          if (is_refused) {
            Item item = TakeItem();
            lock.unlock();
            Complete(std::move(item.continuation));
            lock.lock();
          }
        }
      }
      if (queue_.empty() && now - last_work_ > kLookout) looking_out_ = false;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> queue_;
  std::atomic<int> queued_{0};
  std::atomic<int> spinning_{0};
  int running_ = 0;
  int sleeping_ = 0;
  int waking_ = 0;  // of the sleeping, those that were notified
  std::vector<std::unique_ptr<Worker>> workers_;

  std::condition_variable lookout_wake_;
  bool lookout_started_ = false;
  bool looking_out_ = false;
  Clock::time_point last_work_;
};

}  // namespace

void Continue(std::vector<Continuation> continuations,
              const std::shared_ptr<Gap>& gap) {
  Continuer::Get().Add(std::move(continuations), gap);
}

Status StartContinuing() { return Continuer::Get().Start(); }

bool OnContinuer() { return on_worker; }

}  // namespace jaxcomm
