// Locks that Clang checks. Clang's thread-safety analysis (-Wthread-safety, `make
// lint`) reads the annotations; to other compilers they mean nothing. The locks are
// std::mutex, std::timed_mutex and std::shared_mutex, and cost as much. Waits go by the
// steady clock: who sets the system's clock back delays no timeout.
//
//   Mutex mutex_;
//   ConditionVariable changed_;
//   int count_ GUARDED_BY(mutex_) = 0;
//   void IncreaseLocked() REQUIRES(mutex_);
//
//   MutexLock lock(mutex_);
//   changed_.Wait(mutex_, [this]() REQUIRES(mutex_) { return count_ > 0; });
#ifndef JAXCOMM_FFI_OS_MUTEX_H_
#define JAXCOMM_FFI_OS_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>

// Named as in https://clang.llvm.org/docs/ThreadSafetyAnalysis.html.
#if defined(__clang__)
#define JAXCOMM_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define JAXCOMM_THREAD_SAFETY(attribute)
#endif
#define CAPABILITY(name) JAXCOMM_THREAD_SAFETY(capability(name))
#define SCOPED_CAPABILITY JAXCOMM_THREAD_SAFETY(scoped_lockable)
#define GUARDED_BY(mutex) JAXCOMM_THREAD_SAFETY(guarded_by(mutex))
#define REQUIRES(...) JAXCOMM_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) JAXCOMM_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) JAXCOMM_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define ACQUIRE_SHARED(...) \
  JAXCOMM_THREAD_SAFETY(acquire_shared_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) JAXCOMM_THREAD_SAFETY(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) JAXCOMM_THREAD_SAFETY(release_capability(__VA_ARGS__))
#define RELEASE_SHARED(...) \
  JAXCOMM_THREAD_SAFETY(release_shared_capability(__VA_ARGS__))

namespace jaxcomm {

// A point of the steady clock as waits take it: ThreadSanitizer sees only those by the
// system's clock.
template <typename Duration>
auto OnWaitClock(std::chrono::time_point<std::chrono::steady_clock, Duration> end) {
#if defined(__SANITIZE_THREAD__)
  using System = std::chrono::system_clock;
  return System::now() + std::chrono::duration_cast<System::duration>(
                             end - std::chrono::steady_clock::now());
#else
  return end;
#endif
}

// The members have the standard's names, so that std::unique_lock takes these locks
// too. Clang does not follow std::unique_lock: prefer MutexLock.
template <typename Native>
class CAPABILITY("mutex") BasicMutex {
 public:
  void lock() ACQUIRE() { native_.lock(); }
  void unlock() RELEASE() { native_.unlock(); }

  // Of TimedMutex.
  bool try_lock() TRY_ACQUIRE(true) { return native_.try_lock(); }
  template <typename Duration>
  bool try_lock_for(const Duration& time) TRY_ACQUIRE(true) {
    return native_.try_lock_until(OnWaitClock(std::chrono::steady_clock::now() + time));
  }

  // Of SharedMutex.
  void lock_shared() ACQUIRE_SHARED() { native_.lock_shared(); }
  void unlock_shared() RELEASE_SHARED() { native_.unlock_shared(); }

 private:
  friend class ConditionVariable;
  Native native_;
};
using Mutex = BasicMutex<std::mutex>;
using TimedMutex = BasicMutex<std::timed_mutex>;
using SharedMutex = BasicMutex<std::shared_mutex>;

// Holds a lock until the end of the scope. May unlock and lock again in between.
template <typename AnyMutex>
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(AnyMutex& mutex) ACQUIRE(mutex) : lock_(mutex) {}
  // Of a lock that the caller holds, as after try_lock().
  MutexLock(AnyMutex& mutex, std::adopt_lock_t adopt) REQUIRES(mutex)
      : lock_(mutex, adopt) {}
  ~MutexLock() RELEASE() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void Lock() ACQUIRE() { lock_.lock(); }
  void Unlock() RELEASE() { lock_.unlock(); }

 private:
  std::unique_lock<AnyMutex> lock_;
};

// Holds a SharedMutex together with other readers.
class SCOPED_CAPABILITY ReaderLock {
 public:
  explicit ReaderLock(SharedMutex& mutex) ACQUIRE_SHARED(mutex) : mutex_(mutex) {
    mutex_.lock_shared();
  }
  ~ReaderLock() RELEASE() { mutex_.unlock_shared(); }
  ReaderLock(const ReaderLock&) = delete;
  ReaderLock& operator=(const ReaderLock&) = delete;

 private:
  SharedMutex& mutex_;
};

// std::condition_variable for a Mutex. Each wait unlocks the mutex and locks it again
// before it returns. A condition, if there is one, comes last; waits for a time then
// return whether it holds.
class ConditionVariable {
 public:
  void NotifyOne() { native_.notify_one(); }
  void NotifyAll() { native_.notify_all(); }

  template <typename... Condition>
  void Wait(Mutex& mutex, const Condition&... condition) REQUIRES(mutex) {
    Adopted lock(mutex);
    native_.wait(lock.native, condition...);
  }
  // `end`: of the steady clock.
  template <typename TimePoint, typename... Condition>
  auto WaitUntil(Mutex& mutex, const TimePoint& end, const Condition&... condition)
      REQUIRES(mutex) {
    Adopted lock(mutex);
    return native_.wait_until(lock.native, OnWaitClock(end), condition...);
  }
  template <typename Duration, typename... Condition>
  auto WaitFor(Mutex& mutex, const Duration& time, const Condition&... condition)
      REQUIRES(mutex) {
    return WaitUntil(mutex, std::chrono::steady_clock::now() + time, condition...);
  }

 private:
  // Lends the caller's lock to std::condition_variable.
  struct Adopted {
    explicit Adopted(Mutex& mutex) : native(mutex.native_, std::adopt_lock) {}
    ~Adopted() { native.release(); }
    std::unique_lock<std::mutex> native;
  };

  std::condition_variable native_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_MUTEX_H_
