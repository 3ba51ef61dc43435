#include "ffi/flight/flight_dump.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/flight/python_stacks.h"
#include "ffi/os/forked.h"
#include "ffi/os/mutex.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

// The only failure that is not one of a collective.
constexpr std::string_view kExit = "exit after failure";

// One write, so that lines of several processes do not mix.
void Say(const std::string& text) {
  // If stderr is gone, there is nowhere to report it.
  [[maybe_unused]] const ssize_t written =
      write(STDERR_FILENO, text.data(), text.size());
}

// Opens a new file for writing. Others may write to the folder: an existing file or
// link of that name is removed, never followed.
int OpenNew(const std::string& path) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int fd = open(path.c_str(), kFlags, 0666);
  if (fd >= 0 || errno != EEXIST || unlink(path.c_str()) != 0) return fd;
  return open(path.c_str(), kFlags, 0666);
}

// Writes a temporary file and renames it: no reader sees half of it. Returns the
// problem, or "".
std::string WriteWhole(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".part";
  const int fd = OpenNew(unfinished);
  std::FILE* const file = fd < 0 ? nullptr : fdopen(fd, "w");
  if (file == nullptr) {
    const int problem = errno;
    if (fd >= 0) close(fd);
    return std::strerror(problem);
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  int problem = written ? 0 : errno;
  if (std::fclose(file) != 0 && problem == 0) problem = errno;
  if (problem == 0 && std::rename(unfinished.c_str(), path.c_str()) != 0) {
    problem = errno;
  }
  if (problem == 0) return "";
  std::remove(unfinished.c_str());
  return std::strerror(problem);
}

// A thread that writes files and lines. A network file system, or a pipe that nobody
// reads, may block it forever. The threads that fail collectives must go on.
class Writer {
 public:
  // How long callers wait for the writer, so that the file is there when the program
  // ends with the error. A local disk takes milliseconds.
  static constexpr auto kPatience = std::chrono::seconds(1);

  // Queues `job`.
  void Add(std::function<void()> job) {
    MutexLock lock(mutex_);
    // A forked child has none of its parent's threads.
    if (IsForked() || thread_.Start([this] { Run(); }, "jaxcomm-dump").failure()) {
      lock.Unlock();
      job();
      return;
    }
    // While the thread is blocked, the oldest jobs are dropped.
    if (jobs_.size() >= kMostJobs) {
      jobs_.pop_front();
      ++done_;
    }
    jobs_.push_back(std::move(job));
    ++added_;
    last_added_ = Clock::now();
    changed_.NotifyAll();
  }

  // Waits until all added jobs are done, at most kPatience after the last was added. So
  // a blocked thread delays all of its callers together by kPatience.
  void Wait() {
    if (IsForked()) return;
    MutexLock lock(mutex_);
    const uint64_t mine = added_;
    changed_.WaitUntil(mutex_, last_added_ + kPatience,
                       [&]() REQUIRES(mutex_) { return done_ >= mine; });
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMostJobs = 2;

  void Run() {
    MutexLock lock(mutex_);
    while (true) {
      while (jobs_.empty()) changed_.Wait(mutex_);
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.Unlock();
      job();
      lock.Lock();
      ++done_;
      changed_.NotifyAll();
    }
  }

  Mutex mutex_;
  ConditionVariable changed_;
  std::deque<std::function<void()>> jobs_ GUARDED_BY(mutex_);
  uint64_t added_ GUARDED_BY(mutex_) = 0;
  uint64_t done_ GUARDED_BY(mutex_) = 0;
  Clock::time_point last_added_ GUARDED_BY(mutex_){};
  BackgroundThread thread_ GUARDED_BY(mutex_);
};

class FlightLog {
 public:
  // Never destroyed: the thread that answers signals may use it when the process ends.
  static FlightLog& Get() {
    static FlightLog* const log = new FlightLog;
    return *log;
  }

  void Follow(CommunicatorSummary communicator,
              std::shared_ptr<FlightRecorder> recorder) {
    {
      // What fails from now on may be this one: a failure of its own.
      MutexLock lock(reporting_);
      last_failure_.reset();
    }
    MutexLock lock(mutex_);
    int closed = 0;
    for (size_t i = followed_.size(); i-- > 0;) {
      // The same key: it was closed, and lives only until its last call returns.
      if ((followed_[i].IsClosed() && ++closed > kMostClosed) ||
          followed_[i].of.key == communicator.key) {
        followed_.erase(followed_.begin() + static_cast<int64_t>(i));
      }
    }
    followed_.push_back({std::move(communicator), std::move(recorder)});
  }

  void Prepare(ProcessDescription process, std::string folder, bool says) {
    MutexLock lock(mutex_);
    target_.says = says;
    target_.process = std::move(process);
    target_.folder = std::move(folder);
  }

  std::string Json(std::optional<int64_t> key, std::string_view reason) {
    return FlightRecordJson(target().process, reason, Flights(key, /*closed=*/false));
  }

  void Failed(std::string_view reason) {
    Report(reason);
    writer_.Wait();  // also if another thread reported the same failure
  }

  void Asked() {
    const std::string stacks = PythonStacks();
    if (!target().folder.empty()) {
      WriteFile("signal", Flights(std::nullopt), Who(), stacks);
    } else {
      const std::string lines =
          FlightRecordLines(Flights(std::nullopt, /*closed=*/false));
      SayLater(StrCat(Who(),
                      "last operations (JAXCOMM_DUMP_DIR is not set, so no file):\n",
                      lines.empty() ? "  none\n" : lines, stacks));
    }
    writer_.Wait();
  }

 private:
  // 50 kB each.
  static constexpr int kMostClosed = 16;

  struct Followed {
    CommunicatorSummary of;
    std::shared_ptr<FlightRecorder> recorder;

    // The communicator had the only other reference.
    bool IsClosed() const { return recorder.use_count() == 1; }
  };

  void Report(std::string_view reason) {
    MutexLock lock(reporting_);
    const std::vector<CommunicatorFlight> flights = Flights(std::nullopt);
    if (last_failure_.has_value() && !HasCompletedSince(flights, *last_failure_)) {
      return;
    }
    if (reason == kExitWell) {
      if (!target().folder.empty()) WriteFile(reason, flights, "");
      return;
    }
    last_failure_ = UnixSeconds();
    const std::string what = reason == kExit
                                 ? Who() + "it ends by an exception"
                                 : StrCat(Who(), "a collective failed (", reason, ")");
    if (!target().folder.empty()) {
      WriteFile(reason, flights, what + "; ");
    } else if (!advised_) {
      advised_ = true;
      SayLater(what +
               ". Set JAXCOMM_DUMP_DIR=<folder> to have every process write its last "
               "operations there when that happens.\n");
    }
  }

  void SayLater(std::string text) {
    writer_.Add([text = std::move(text)] { Say(text); });
  }

  // Where records go.
  struct Target {
    ProcessDescription process;
    std::string folder;
    bool says = true;
  };
  Target target() {
    MutexLock lock(mutex_);
    return target_;
  }

  std::vector<CommunicatorFlight> Flights(std::optional<int64_t> key,
                                          bool closed = true) {
    std::vector<CommunicatorFlight> flights;
    std::vector<std::shared_ptr<FlightRecorder>> recorders;
    {
      MutexLock lock(mutex_);
      for (const Followed& followed : followed_) {
        if (key.has_value() && followed.of.key != *key) continue;
        const bool is_closed = followed.IsClosed();
        if (is_closed && !closed) continue;
        flights.push_back({followed.of, is_closed, {}});
        recorders.push_back(followed.recorder);
      }
    }
    for (size_t i = 0; i < flights.size(); ++i) {
      flights[i].entries = recorders[i]->Snapshot();
    }
    return flights;
  }

  static bool HasCompletedSince(const std::vector<CommunicatorFlight>& flights,
                                double unix_seconds) {
    for (const CommunicatorFlight& flight : flights) {
      for (const FlightRecorder::Entry& entry : flight.entries) {
        if (entry.state == FlightRecorder::State::kCompleted &&
            entry.started > unix_seconds) {
          return true;
        }
      }
    }
    return false;
  }

  std::string Who() {
    const ProcessDescription own = target().process;
    return StrCat("jaxcomm: process ", own.process, " of ", own.processes, ": ");
  }

  // Makes the record now; the writer thread writes it, and says so if there is a
  // beginning of a line for that.
  void WriteFile(std::string_view reason,
                 const std::vector<CommunicatorFlight>& flights,
                 const std::string& beginning, std::string_view stacks = "") {
    const Target to = target();
    const std::string path =
        StrCat(to.folder, "/flight-record-", to.process.process, ".json");
    const std::string advice =
        to.process.processes > 1
            ? StrCat("; compare all with python -m jaxcomm.doctor --merge ", to.folder,
                     "/flight-record-*.json\n")
            : StrCat("; explained by python -m jaxcomm.doctor --merge ", path, "\n");
    writer_.Add([path, to, advice, beginning,
                 text = FlightRecordJson(to.process, reason, flights, stacks)] {
      const std::string problem = WriteWhole(path, text);
      if (!problem.empty()) {
        Say(StrCat(beginning, "cannot write the flight record to ", path, ": ", problem,
                   "; see JAXCOMM_DUMP_DIR\n"));
        return;
      }
      if (!to.says || beginning.empty()) return;
      Say(StrCat(beginning, "flight record: ", path, advice));
    });
  }

  Mutex mutex_;
  std::vector<Followed> followed_ GUARDED_BY(mutex_);
  Target target_ GUARDED_BY(mutex_);

  Mutex reporting_;  // never held while a file is written
  std::optional<double> last_failure_ GUARDED_BY(reporting_);
  bool advised_ GUARDED_BY(reporting_) = false;

  Writer writer_;
};

}  // namespace

void FollowFlight(CommunicatorSummary communicator,
                  std::shared_ptr<FlightRecorder> recorder) {
  FlightLog::Get().Follow(std::move(communicator), std::move(recorder));
}

void PrepareFlightDumps(ProcessDescription process, std::string folder, bool says) {
  FlightLog::Get().Prepare(std::move(process), std::move(folder), says);
}

std::string FlightRecordOf(std::optional<int64_t> key, std::string_view reason) {
  return FlightLog::Get().Json(key, reason);
}

void DumpFlightRecords(std::string_view reason) { FlightLog::Get().Failed(reason); }

void AnswerFlightRequest() { FlightLog::Get().Asked(); }

}  // namespace jaxcomm
