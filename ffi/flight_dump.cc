#include "ffi/flight_dump.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/communicator.h"
#include "ffi/status.h"

namespace jaxcomm {
namespace {

// The one reason that is no collective's.
constexpr std::string_view kExit = "exit after failure";

// One write, so that lines of several processes do not mix.
void Say(const std::string& text) {
  // Nobody is left to be told that stderr is gone.
  [[maybe_unused]] const ssize_t written =
      write(STDERR_FILENO, text.data(), text.size());
}

// Whoever reads the file meets the whole of it. Returns what went wrong, or "".
std::string WriteWhole(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".part";
  std::FILE* file = std::fopen(unfinished.c_str(), "we");
  if (file == nullptr) return std::strerror(errno);
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

class FlightLog {
 public:
  // Never destroyed: the thread that answers signals may be in it when the process
  // ends.
  static FlightLog& Get() {
    static FlightLog* const log = new FlightLog;
    return *log;
  }

  void Follow(const CommunicatorSpec& spec, std::weak_ptr<FlightRecorder> recorder) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = followed_.size(); i-- > 0;) {
      // Also one that was closed and lives on only in a call.
      if (followed_[i].recorder.expired() || followed_[i].of.key == spec.key) {
        followed_.erase(followed_.begin() + static_cast<int64_t>(i));
      }
    }
    followed_.push_back({FlownCommunicator(spec), std::move(recorder)});
  }

  void Prepare(ProcessDescription process, std::string folder) {
    std::scoped_lock lock(writing_, mutex_);
    has_written_ =
        has_written_ && folder == folder_ && process.process == process_.process;
    process_ = std::move(process);
    folder_ = std::move(folder);
  }

  std::string Json(std::optional<int64_t> key, std::string_view reason) {
    const std::vector<CommunicatorFlight> flights = Flights(key);
    return FlightRecordJson(process(), reason, flights);
  }

  void Failed(std::string_view reason) {
    std::lock_guard<std::mutex> lock(writing_);
    const std::vector<CommunicatorFlight> flights = Flights(std::nullopt);
    if (last_failure_.has_value() && !HasCompletedSince(flights, *last_failure_))
      return;
    last_failure_ = UnixSeconds();
    const std::string what = reason == kExit
                                 ? Who() + "it ends by an exception"
                                 : StrCat(Who(), "a collective failed (", reason, ")");
    if (!folder().empty()) {
      WriteFile(reason, flights, what + "; ");
    } else if (!advised_) {
      advised_ = true;
      Say(what +
          ". Set JAXCOMM_DUMP_DIR=<folder> to have every process write its last "
          "operations there when that happens.\n");
    }
  }

  void Asked() {
    std::lock_guard<std::mutex> lock(writing_);
    const std::vector<CommunicatorFlight> flights = Flights(std::nullopt);
    if (!folder().empty()) {
      // What it left there says more than that its communicators are closed.
      if (has_written_ && !HasEntries(flights)) return;
      WriteFile("signal", flights, Who());
      return;
    }
    const std::string lines = FlightRecordLines(flights);
    Say(StrCat(Who(), "last operations (JAXCOMM_DUMP_DIR is not set, so no file):\n",
               lines.empty() ? "  none\n" : lines));
  }

 private:
  struct Followed {
    FlownCommunicator of;
    std::weak_ptr<FlightRecorder> recorder;
  };

  ProcessDescription process() {
    std::lock_guard<std::mutex> lock(mutex_);
    return process_;
  }

  std::string folder() {
    std::lock_guard<std::mutex> lock(mutex_);
    return folder_;
  }

  std::vector<CommunicatorFlight> Flights(std::optional<int64_t> key) {
    std::vector<CommunicatorFlight> flights;
    std::vector<std::shared_ptr<FlightRecorder>> recorders;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const Followed& followed : followed_) {
        if (key.has_value() && followed.of.key != *key) continue;
        auto recorder = followed.recorder.lock();
        if (recorder == nullptr) continue;
        flights.push_back({followed.of, {}});
        recorders.push_back(std::move(recorder));
      }
    }
    for (size_t i = 0; i < flights.size(); ++i) {
      flights[i].entries = recorders[i]->Snapshot();
    }
    return flights;
  }

  static bool HasEntries(const std::vector<CommunicatorFlight>& flights) {
    for (const CommunicatorFlight& flight : flights) {
      if (!flight.entries.empty()) return true;
    }
    return false;
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
    const ProcessDescription own = process();
    return StrCat("jaxcomm: process ", own.process, " of ", own.processes, ": ");
  }

  // Holds writing_.
  void WriteFile(std::string_view reason,
                 const std::vector<CommunicatorFlight>& flights,
                 const std::string& beginning) {
    const ProcessDescription own = process();
    const std::string path =
        folder() + "/flight-record-" + std::to_string(own.process) + ".json";
    const std::string problem =
        WriteWhole(path, FlightRecordJson(own, reason, flights));
    has_written_ = has_written_ || problem.empty();
    if (!problem.empty()) {
      Say(StrCat(beginning, "cannot write the flight record to ", path, ": ", problem,
                 "; see JAXCOMM_DUMP_DIR\n"));
    } else if (own.processes > 1) {
      Say(StrCat(beginning, "flight record: ", path,
                 "; compare all with python -m jaxcomm.doctor --merge ", folder(),
                 "/flight-record-*.json\n"));
    } else {
      Say(StrCat(beginning, "flight record: ", path,
                 "; explained by python -m jaxcomm.doctor --merge ", path, "\n"));
    }
  }

  std::mutex mutex_;
  std::vector<Followed> followed_;
  ProcessDescription process_;
  std::string folder_;

  std::mutex writing_;
  std::optional<double> last_failure_;
  bool has_written_ = false;
  bool advised_ = false;
};

}  // namespace

void FollowFlight(const CommunicatorSpec& spec,
                  std::weak_ptr<FlightRecorder> recorder) {
  FlightLog::Get().Follow(spec, std::move(recorder));
}

void PrepareFlightDumps(ProcessDescription process, std::string folder) {
  FlightLog::Get().Prepare(std::move(process), std::move(folder));
}

std::string FlightRecordOf(std::optional<int64_t> key, std::string_view reason) {
  return FlightLog::Get().Json(key, reason);
}

void DumpFlightRecords(std::string_view reason) { FlightLog::Get().Failed(reason); }

void AnswerFlightRequest() { FlightLog::Get().Asked(); }

}  // namespace jaxcomm
