// Runs a few threads of a program under every schedule, up to a number of surprises.
//
// A file under test is included inside `namespace explored`. There std::atomic, fences,
// the futex and mutexes are those below, and everything else is the real one. A thread
// is a context of this one, and goes on until it is made to stop before an operation
// that others can see. A surprise is a switch that nothing asked for, or a store that
// others see late, as processors do it: up to the next fence, or to the thread's sleep.
// The search is stateless, with bounded surprises: Musuvathi and Qadeer, PLDI 2007.
//
// It sees lost wakeups, missing fences between a store and a load, and states that are
// read in between. It does not see loads that pass loads: ThreadSanitizer does, where
// they lead to data.
#ifndef JAXCOMM_TESTS_FFI_SCHEDULES_H_
#define JAXCOMM_TESTS_FFI_SCHEDULES_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace explored {

class Explorer {
 public:
  // The one that runs, or null: then operations take effect at once.
  static Explorer*& Running() {
    static Explorer* running = nullptr;
    return running;
  }

  explicit Explorer(int most_surprises) : most_surprises_(most_surprises) {}

  // Runs the threads once. Returns whether all came to their ends: otherwise all wait.
  bool Run(const std::vector<std::function<void()>>& threads) {
    trail_.resize(position_of_change_ + 1 > trail_.size() ? trail_.size()
                                                          : position_of_change_ + 1);
    next_ = 0;
    surprises_ = 0;
    threads_.resize(threads.size());
    for (size_t i = 0; i < threads.size(); ++i) {
      Thread& thread = threads_[i];
      if (thread.stack == nullptr) thread.stack.reset(new char[kStackBytes]);
      thread.body = &threads[i];
      thread.waits = thread.is_over = thread.holds_lock = false;
      thread.late.clear();
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStackBytes;
      thread.context.uc_link = &main_;
      makecontext(&thread.context, &Explorer::Enter, 0);
    }
    Running() = this;
    current_ = -1;
    const bool all_end = SwitchToAnother();
    Running() = nullptr;
    ++runs_;
    return all_end;
  }

  // Changes the last decision that can be another. False: all schedules were run.
  bool Next() {
    while (!trail_.empty()) {
      Decision& last = trail_.back();
      if (++last.taken < last.choices) {
        position_of_change_ = trail_.size() - 1;
        return true;
      }
      trail_.pop_back();
    }
    return false;
  }

  int64_t runs() const { return runs_; }

  // Before an operation that others can see.
  void Point() {
    const int others = Others();
    if (others == 0 || surprises_ == most_surprises_) return;
    const int choice = Decide(1 + others);
    if (choice == 0) return;
    ++surprises_;
    Switch(NthOther(choice));
  }
  // Whether a store becomes visible late.
  bool IsLate() {
    if (surprises_ == most_surprises_ || Decide(2) == 0) return false;
    ++surprises_;
    return true;
  }
  // Returns once the condition holds.
  void WaitUntil(std::function<bool()> condition) {
    Flush();
    Thread& me = threads_[current_];
    me.ready = std::move(condition);
    while (!me.ready()) {
      me.waits = true;
      SwitchToAnother();
    }
    me.waits = false;
  }
  // How often a thread has changed something that others see.
  uint64_t changes() const { return changes_; }
  void Changed() { ++changes_; }

  // Stores of the running thread that others do not see yet.
  struct Late {
    void* where;
    uint64_t bits;
    std::function<void()> store;
  };
  std::vector<Late>& late() { return threads_[current_].late; }
  void Flush() {
    for (const Late& each : late()) each.store();
    late().clear();
  }

  bool& holds_lock() { return threads_[current_].holds_lock; }

 private:
  static constexpr size_t kStackBytes = 256 << 10;

  struct Thread {
    std::unique_ptr<char[]> stack;
    ucontext_t context;
    const std::function<void()>* body = nullptr;
    bool waits = false, is_over = false, holds_lock = false;
    std::function<bool()> ready;
    std::vector<Late> late;
  };
  struct Decision {
    int taken, choices;
  };

  static void Enter() {
    Explorer& self = *Running();
    (*self.threads_[self.current_].body)();
    self.Flush();
    self.threads_[self.current_].is_over = true;
    self.Changed();
    self.SwitchToAnother();
  }

  bool CanRun(int i) const {
    const Thread& thread = threads_[i];
    return !thread.is_over && (!thread.waits || thread.ready());
  }
  int Others() const {
    int count = 0;
    for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
      count += i != current_ && CanRun(i);
    }
    return count;
  }
  // Counted from 1.
  int NthOther(int n) const {
    for (int i = 0;; ++i) {
      if (i != current_ && CanRun(i) && --n == 0) return i;
    }
  }
  // Where this one cannot go on. True if all are over.
  bool SwitchToAnother() {
    const int others = Others();
    if (others > 0) {
      Switch(NthOther(1 + Decide(others)));
    } else if (current_ >= 0) {
      setcontext(&main_);  // all are over, or all wait
    }
    for (const Thread& thread : threads_) {
      if (!thread.is_over) return false;
    }
    return true;
  }
  void Switch(int to) {
    const int from = std::exchange(current_, to);
    if (from == to) return;
    ucontext_t* const here = from < 0 ? &main_ : &threads_[from].context;
    swapcontext(here, &threads_[to].context);
  }

  int Decide(int choices) {
    if (choices == 1) return 0;
    if (next_ == trail_.size()) trail_.push_back({0, choices});
    return trail_[next_++].taken;
  }

  const int most_surprises_;
  std::vector<Decision> trail_;
  size_t next_ = 0, position_of_change_ = 0;
  int surprises_ = 0, current_ = -1;
  int64_t runs_ = 0;
  uint64_t changes_ = 0;
  std::vector<Thread> threads_;
  ucontext_t main_;
};

namespace std {

using namespace ::std;

template <typename T>
class atomic {
 public:
  static constexpr bool is_always_lock_free = ::std::atomic<T>::is_always_lock_free;

  constexpr atomic(T value = T()) : value_(value) {}

  T load(memory_order order = memory_order_seq_cst) const {
    Explorer* const explorer = Explorer::Running();
    if (explorer == nullptr) return value_;
    // Under the lock, relaxed operations are on what it guards.
    if (order != memory_order_relaxed || !explorer->holds_lock()) explorer->Point();
    for (auto late = explorer->late().rbegin(); late != explorer->late().rend();
         ++late) {
      if (late->where == this) return static_cast<T>(late->bits);
    }
    return value_;
  }
  void store(T value, memory_order order = memory_order_seq_cst) {
    Explorer* const explorer = Explorer::Running();
    if (explorer == nullptr ||
        (order == memory_order_relaxed && explorer->holds_lock())) {
      value_ = value;
      return;
    }
    explorer->Point();
    const auto store = [this, explorer, value] {
      value_ = value;
      explorer->Changed();
    };
    // A store waits for those before it, unless it is relaxed.
    bool follows = false;
    for (const auto& late : explorer->late()) {
      follows |= order != memory_order_relaxed || late.where == this;
    }
    if (order != memory_order_seq_cst && (follows || explorer->IsLate())) {
      explorer->late().push_back({this, static_cast<uint64_t>(value), store});
      return;
    }
    explorer->Flush();
    store();
  }
  operator T() const { return load(); }
  T operator=(T value) {
    store(value);
    return value;
  }

  T exchange(T to, memory_order order = memory_order_seq_cst) {
    return Change(order, [to](T) { return to; });
  }
  T fetch_add(T by, memory_order order = memory_order_seq_cst) {
    return Change(order, [by](T value) { return static_cast<T>(value + by); });
  }
  T fetch_or(T bits, memory_order order = memory_order_seq_cst) {
    return Change(order, [bits](T value) { return static_cast<T>(value | bits); });
  }
  T fetch_and(T bits, memory_order order = memory_order_seq_cst) {
    return Change(order, [bits](T value) { return static_cast<T>(value & bits); });
  }

 private:
  template <typename Next>
  T Change(memory_order order, const Next& next) {
    Explorer* const explorer = Explorer::Running();
    if (explorer == nullptr) return ::std::exchange(value_, next(value_));
    if (order != memory_order_relaxed || !explorer->holds_lock()) explorer->Point();
    explorer->Flush();
    explorer->Changed();
    return ::std::exchange(value_, next(value_));
  }

  T value_;
};

inline void atomic_thread_fence(memory_order) {
  if (Explorer::Running() == nullptr) return;
  Explorer::Running()->Point();
  Explorer::Running()->Flush();
}

}  // namespace std

inline long syscall(long, std::atomic<uint32_t>* futex, int operation, uint32_t seen,
                    const timespec*, void*, int) {
  Explorer* const explorer = Explorer::Running();
  if (explorer == nullptr) return 0;
  explorer->Point();
  explorer->Flush();
  // There is no time in a schedule: whoever is not woken sleeps for ever.
  static std::atomic<uint32_t>* woken = nullptr;
  static uint64_t wakes = 0;
  if (operation == FUTEX_WAKE) {
    woken = futex;
    ++wakes;
  } else if (futex->load(::std::memory_order_relaxed) == seen) {
    const uint64_t before = wakes;
    explorer->WaitUntil([futex, before] { return wakes != before && woken == futex; });
  }
  return 0;
}

// A lock that waits as long as it must.
struct pthread_mutex_t {
  bool is_held = false;
};
inline int pthread_mutex_trylock(pthread_mutex_t* mutex) {
  Explorer* const explorer = Explorer::Running();
  if (explorer == nullptr) return 0;
  explorer->Point();
  if (mutex->is_held) explorer->WaitUntil([mutex] { return !mutex->is_held; });
  mutex->is_held = true;
  explorer->holds_lock() = true;
  return 0;
}
inline int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  Explorer* const explorer = Explorer::Running();
  if (explorer == nullptr) return 0;
  explorer->Flush();
  explorer->Changed();
  mutex->is_held = false;
  explorer->holds_lock() = false;
  explorer->Point();
  return 0;
}
template <typename... Arguments>
int pthread_mutex_clocklock(pthread_mutex_t*, Arguments...) {
  return EBUSY;
}
template <typename... Arguments>
int pthread_mutex_timedlock(pthread_mutex_t*, Arguments...) {
  return EBUSY;
}
inline int pthread_mutex_consistent(pthread_mutex_t*) { return 0; }
inline int pthread_mutex_init(pthread_mutex_t*, void*) { return 0; }

}  // namespace explored

#endif  // JAXCOMM_TESTS_FFI_SCHEDULES_H_
