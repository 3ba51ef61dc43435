// Threads of ours, and whether all threads of a process wait for each other.
#include <fenv.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "ffi/os/standstill.h"
#include "ffi/os/start_thread.h"
#include "ffi/os/system_file.h"
#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

TEST(a_thread_of_ours_depends_on_nothing_of_the_one_that_starts_it) {
  // XLA runs its programs so, and ours go on with them.
  fesetround(FE_UPWARD);
  for (const bool detached : {false, true}) {
    Event ended;
    const auto body = [&] {
      volatile float tiny = 1e-39f, one = 1.0f, half_a_bit = 5e-8f;
      CHECK_EQ(tiny * one, 0.0f);            // takes subnormals for 0
      CHECK_EQ(1e-30f * one * 1e-9f, 0.0f);  // and makes none
      CHECK_EQ(one + half_a_bit, 1.0f);      // rounds to nearest
      char name[16];
      pthread_getname_np(pthread_self(), name, sizeof(name));
      CHECK_EQ(std::string(name), "jaxcomm-test");
      sigset_t blocked;
      pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
      for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD}) {
        CHECK_TRUE(sigismember(&blocked, signal));
      }
      CHECK_TRUE(!sigismember(&blocked, SIGSEGV));  // Python's faulthandler answers it
      ended.Set();
    };
    if (detached) {
      CHECK_OK(StartDetached(body, "jaxcomm-test"));
    } else {
      Must(StartThread(body, "jaxcomm-test")).join();
    }
    CHECK_TRUE(ended.Wait());
  }
  CHECK_EQ(fegetround(), FE_UPWARD);
  fesetround(FE_TONEAREST);
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  CHECK_TRUE(!sigismember(&blocked, SIGTERM));
}

// Does what it is told, one thing after the other, and waits for another thread
// between.
class Worker {
 public:
  explicit Worker(const std::function<void()>& first = [] {}) { Tell(first); }
  ~Worker() {
    Tell([this] { ends_ = true; });
    thread_.join();
  }
  void Tell(std::function<void()> next) {
    std::lock_guard<std::mutex> lock(mutex_);
    next_.push_back(std::move(next));
    changed_.notify_all();
  }
  bool is_done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return next_.empty();
  }

 private:
  void Run() {
    while (!ends_) {
      std::function<void()> next;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !next_.empty(); });
        next = next_.front();
      }
      next();
      std::lock_guard<std::mutex> lock(mutex_);
      next_.pop_front();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> next_;
  bool ends_ = false;
  std::thread thread_{[this] { Run(); }};
};

// Whether a thread of this process sleeps in a call of the system.
bool IsIn(long call, int64_t thread) {
  const std::string path = StrCat("/proc/self/task/", thread, "/syscall");
  return ReadSystemFile(path).rfind(StrCat(call, " "), 0) == 0;
}

#ifndef __SANITIZE_THREAD__  // it has a thread of its own, which sleeps
TEST_ALONE(a_process_stands_still_if_its_threads_wait_for_each_other, EXIT_SUCCESS) {
  std::mutex mutex;
  std::condition_variable over;
  bool is_over = false;
  Pipe library_wakes, wakes;
  // As a program of the user's may be called. Threads have the name of the one that
  // begins them.
  pthread_setname_np(pthread_self(), "jaxcomm-train");
  Worker library([&] { library_wakes.Wait(); }), worker;
  Event looked, found;
  std::thread looks = Must(StartThread(
      [&] {
        Standstill standstill;
        const auto is_still = [&] { return standstill.Look(); };
        // A library's thread reads before the first program runs.
        CHECK_TRUE(Until([&] {
          standstill.Learn();
          return standstill.Look();
        }));
        CHECK_TRUE(standstill.Look());
        // It ran in between.
        worker.Tell([] {});
        CHECK_TRUE(Until([&] { return worker.is_done(); }));
        CHECK_TRUE(!standstill.Look());
        CHECK_TRUE(Until(is_still));
        // What a callback of a program may do: compute, read, wait for a while.
        std::atomic<bool> computes{true};
        std::timed_mutex held;
        held.lock();
        struct Block {
          std::function<void()> begin, end;
        };
        const std::vector<Block> blocks = {
            {[&] {
               while (computes) continue;
             },
             [&] { computes = false; }},
            {[&] { wakes.Wait(); }, [&] { wakes.Tell(); }},
            {[&] {
               CHECK_TRUE(
                   held.try_lock_for(std::chrono::duration<double>(kHangSeconds)));
             },
             [&] { held.unlock(); }}};
        for (const Block& block : blocks) {
          worker.Tell(block.begin);
          for (int look = 0; look < 5; ++look) {
            CHECK_TRUE(!standstill.Look());
            LetOthersRun();
          }
          standstill.Learn();
          CHECK_TRUE(!standstill.Look());
          CHECK_TRUE(!standstill.Look());
          block.end();
          CHECK_TRUE(Until(is_still));
        }
        // So may a thread that comes later.
        std::unique_ptr<Worker> later;
        worker.Tell([&] { later = std::make_unique<Worker>([&] { wakes.Wait(); }); });
        for (int look = 0; look < 5; ++look) {
          LetOthersRun();
          CHECK_TRUE(!standstill.Look());
        }
        wakes.Tell();
        CHECK_TRUE(Until(is_still));
        later.reset();
        // And what was taken for a library's until it waited for a thread.
        std::atomic<int64_t> reader{0};
        library_wakes.Tell();
        library.Tell([&] { reader = syscall(SYS_gettid); });
        CHECK_TRUE(Until([&] { return IsIn(SYS_futex, reader); }));
        standstill.Learn();
        library.Tell([&] { library_wakes.Wait(); });
        CHECK_TRUE(Until([&] { return IsIn(SYS_read, reader); }));
        for (int look = 0; look < 3; ++look) CHECK_TRUE(!standstill.Look());
        library_wakes.Tell();
        CHECK_TRUE(Until(is_still));
        {
          std::lock_guard<std::mutex> lock(mutex);
          is_over = true;
          over.notify_all();
        }
        // The main thread computes.
        for (int look = 0; look < 5; ++look) {
          LetOthersRun();
          CHECK_TRUE(!standstill.Look());
        }
        looked.Set();
        // It waits, and looks for signals several times a second.
        CHECK_TRUE(Until(is_still));
        found.Set();
      },
      "jaxcomm-test"));
  {
    std::unique_lock<std::mutex> lock(mutex);
    over.wait(lock, [&] { return is_over; });
  }
  while (!looked.is_set()) continue;
  int word = 0;
  while (!found.is_set()) {
    timespec moment = {0, 10'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, word, &moment, nullptr, 0);
  }
  looks.join();
}
#endif

}  // namespace
}  // namespace jaxcomm::testing
