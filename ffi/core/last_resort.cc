#include "ffi/core/last_resort.h"

#include <unistd.h>

#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <utility>

#include "ffi/base/status.h"
#include "ffi/flight/flight_dump.h"
#include "ffi/os/mutex.h"
#include "ffi/os/say.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

// How long to wait for the message and the flight records: a pipe may be full, and a
// disk may hang.
constexpr auto kLastPatience = std::chrono::seconds(1);

class Deadlines {
 public:
  // Never destroyed: its thread runs as long as the process.
  static Deadlines& Get() {
    static Deadlines* const deadlines = new Deadlines;
    return *deadlines;
  }

  bool Start() {
    MutexLock lock(mutex_);
    return StartLocked();
  }

  uint64_t Add(double seconds, std::string text) {
    MutexLock lock(mutex_);
    if (!StartLocked()) return 0;
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(seconds));
    pending_[++last_] = {end, std::move(text)};
    if (end < wakes_at_) changed_.NotifyOne();
    return last_;
  }

  void Remove(uint64_t number) {
    MutexLock lock(mutex_);
    pending_.erase(number);
  }

 private:
  struct Pending {
    Clock::time_point end;
    std::string text;
  };

  bool StartLocked() REQUIRES(mutex_) {
    return thread_.Start([this] { Run(); }, "jaxcomm-last").success();
  }

  void Run() {
    MutexLock lock(mutex_);
    while (true) {
      const Clock::time_point now = Clock::now();
      wakes_at_ = now + std::chrono::hours(1);
      for (const auto& [number, pending] : pending_) {
        if (pending.end <= now) EndProcess(pending.text);
        wakes_at_ = std::min(wakes_at_, pending.end);
      }
      changed_.WaitUntil(mutex_, wakes_at_);
    }
  }

  Mutex mutex_;
  ConditionVariable changed_;
  std::map<uint64_t, Pending> pending_ GUARDED_BY(mutex_);
  Clock::time_point wakes_at_ GUARDED_BY(mutex_) = Clock::time_point::max();
  uint64_t last_ GUARDED_BY(mutex_) = 0;
  BackgroundThread thread_ GUARDED_BY(mutex_);
};

}  // namespace

void EndProcess(const std::string& text) {
  const auto end = Clock::now() + kLastPatience;
  const auto said = Say(StrCat("jaxcomm: ", text, ". The process ends\n"));
  // Shared with a thread that may outlive this function's frame by a moment.
  const auto dumped = std::make_shared<std::promise<void>>();
  const auto dump = [dumped] {
    DumpFlightRecords("process ended");
    dumped->set_value();
  };
  // If no thread can be had, the records stay unwritten.
  if (StartDetached(dump).success()) dumped->get_future().wait_until(end);
  said.wait_until(end);
  _exit(kEndedStatus);
}

LastResort::LastResort(double seconds, std::string text)
    : number_(Deadlines::Get().Add(seconds, std::move(text))) {}

LastResort::~LastResort() { Deadlines::Get().Remove(number_); }

bool LastResort::Prepare() { return Deadlines::Get().Start(); }

}  // namespace jaxcomm
