#include "ffi/core/last_resort.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "ffi/core/status.h"
#include "ffi/flight/flight_dump.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

// For the flight records, whose disk may hang.
constexpr auto kDumpPatience = std::chrono::seconds(1);

class Deadlines {
 public:
  // Never destroyed: its thread runs as long as the process.
  static Deadlines& Get() {
    static Deadlines* const deadlines = new Deadlines;
    return *deadlines;
  }

  bool Start() {
    std::lock_guard<std::mutex> lock(mutex_);
    return StartLocked();
  }

  uint64_t Add(double seconds, std::string text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!StartLocked()) return 0;
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(seconds));
    pending_[++last_] = {end, std::move(text)};
    if (end < wakes_at_) changed_.notify_one();
    return last_;
  }

  void Remove(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.erase(number);
  }

 private:
  struct Pending {
    Clock::time_point end;
    std::string text;
  };

  bool StartLocked() {
    if (started_) return true;
    std::thread thread;
    started_ = StartThread([this] { Run(); }, &thread).success();
    if (started_) thread.detach();
    return started_;
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const Clock::time_point now = Clock::now();
      wakes_at_ = now + std::chrono::hours(1);
      for (const auto& [number, pending] : pending_) {
        if (pending.end <= now) EndProcess(pending.text);
        wakes_at_ = std::min(wakes_at_, pending.end);
      }
      // By the system's clock: ThreadSanitizer does not see waits by another.
      changed_.wait_until(lock, std::chrono::system_clock::now() + (wakes_at_ - now));
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Pending> pending_;
  Clock::time_point wakes_at_ = Clock::time_point::max();
  uint64_t last_ = 0;
  bool started_ = false;
};

}  // namespace

void EndProcess(const std::string& text) {
  const std::string line = StrCat("jaxcomm: ", text, ". The process ends\n");
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, line.data(), line.size());
  // Shared with a thread that may outlive this function's frame by a moment.
  struct Dump {
    std::mutex mutex;
    std::condition_variable done;
    bool is_done = false;
  };
  static auto& dump = *new Dump;
  try {
    std::thread([] {
      DumpFlightRecords("process ended");
      std::lock_guard<std::mutex> lock(dump.mutex);
      dump.is_done = true;
      dump.done.notify_all();
    }).detach();
    std::unique_lock<std::mutex> lock(dump.mutex);
    dump.done.wait_until(lock, std::chrono::system_clock::now() + kDumpPatience,
                         [] { return dump.is_done; });
  } catch (const std::system_error&) {
    // No thread can be had: the records stay unwritten.
  }
  _exit(kEndedStatus);
}

LastResort::LastResort(double seconds, std::string text)
    : number_(Deadlines::Get().Add(seconds, std::move(text))) {}

LastResort::~LastResort() { Deadlines::Get().Remove(number_); }

bool LastResort::Prepare() { return Deadlines::Get().Start(); }

}  // namespace jaxcomm
