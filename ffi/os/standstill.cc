#include "ffi/os/standstill.h"

#include <dirent.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "ffi/base/status.h"
#include "ffi/os/start_thread.h"
#include "ffi/os/system_file.h"

namespace jaxcomm {
namespace {

bool BeginsWith(const std::string& text, const char* begin) {
  return text.rfind(begin, 0) == 0;
}

// On which XLA's programs continue: see host/local/continuer.cc.
constexpr char kOfPrograms[] = "jaxcomm-run";

// In one look, while the main thread runs.
constexpr int kLooksAtMain = 10;

// Threads of CUDA wait for GPUs, which then wake the program.
constexpr char kOfGpu[] = "cuda";

// Whether a thread never runs a program. gRPC starts new ones at any time.
bool IsOfLibrary(int64_t thread, const std::string& name) {
  if (IsThreadOfOurs(thread)) return name != kOfPrograms;
  return name == "event_engine" || name == "lifeguard" || name == "grpc_global_tim";
}

// What a thread sleeps in.
struct SystemCall {
  // Of a line of /proc/.../syscall: the number of the call, then its arguments.
  explicit SystemCall(const std::string& line) : runs(BeginsWith(line, "running")) {
    char* at = nullptr;
    number = std::strtol(line.c_str(), &at, 10);
    if (at == line.c_str()) number = -1;
    for (uint64_t& argument : arguments) argument = std::strtoull(at, &at, 16);
  }

  // Whether only another thread of this process ends it.
  bool WaitsForThread() const {
    const uint64_t operation = arguments[1], timeout = arguments[3];
    const uint64_t command = operation & static_cast<uint64_t>(FUTEX_CMD_MASK);
    return number == SYS_futex && timeout == 0 &&
           (command == FUTEX_WAIT || command == FUTEX_WAIT_BITSET) &&
           (operation & FUTEX_PRIVATE_FLAG) != 0;
  }
  // Whether it waits for a thread as JAX does in the main thread, for several devices:
  // it looks for signals several times a second. Python's and C's own waits with a
  // timeout use another command.
  bool LooksForSignals() const {
    return number == SYS_futex && arguments[1] == FUTEX_WAIT_PRIVATE &&
           arguments[3] != 0;
  }
  // The descriptor on which it waits for events; -1: none.
  int64_t polled() const {
#ifdef SYS_epoll_wait
    if (number == SYS_epoll_wait) return static_cast<int64_t>(arguments[0]);
#endif
    return number == SYS_epoll_pwait ? static_cast<int64_t>(arguments[0]) : -1;
  }

  bool runs;
  long number;
  uint64_t arguments[4];
};

// The lines "voluntary_ctxt_switches: 5" and "nonvoluntary_ctxt_switches: 7" of a
// thread that sleeps; else nothing.
std::string SwitchesOf(const std::string& status) {
  const size_t at = status.find("voluntary_ctxt_switches");
  const bool sleeps = status.find("State:\tS") != std::string::npos;
  return at == std::string::npos || !sleeps ? "" : status.substr(at);
}

}  // namespace

struct Standstill::Seen {
  Thread thread;
  std::string name;
  std::string switches;
  SystemCall call;
};

// Visits all threads, but those that end meanwhile, until `visit` returns false. False
// if it did, or if the system does not show them.
template <typename Visit>
bool Standstill::ForThreads(const Visit& visit) {
  DIR* const folder = opendir("/proc/self/task");
  if (folder == nullptr) return false;
  bool goes_on = true;
  while (const dirent* const entry = goes_on ? readdir(folder) : nullptr) {
    if (entry->d_name[0] == '.') continue;
    const std::string path = StrCat("/proc/self/task/", entry->d_name, "/");
    const std::string stat = ReadSystemFile(path + "stat");
    const size_t name = stat.find('('), end = stat.rfind(')');
    if (name == std::string::npos || end == std::string::npos) {
      // It has ended; or no descriptor is left to look at it.
      goes_on = access(path.c_str(), F_OK) != 0;
      continue;
    }
    const char* at = stat.c_str() + end;
    for (int field = 2; at != nullptr && field < 22; ++field) {
      at = std::strchr(at + 1, ' ');
    }
    const uint64_t start = at == nullptr ? 0 : std::strtoull(at + 1, nullptr, 10);
    // The call first: Linux also shows that of a thread which is being woken. It then
    // does not sleep, or has run and counts one switch more.
    const SystemCall call(ReadSystemFile(path + "syscall"));
    const Seen seen{{std::strtoll(entry->d_name, nullptr, 10), start},
                    stat.substr(name + 1, end - name - 1),
                    SwitchesOf(ReadSystemFile(path + "status")),
                    call};
    goes_on = visit(seen);
  }
  closedir(folder);
  return goes_on;
}

void Standstill::Learn() {
  ForThreads([&](const Seen& seen) {
    const bool is_main = seen.thread.first == getpid();
    if (seen.call.WaitsForThread() || is_main || seen.name == kOfPrograms) {
      of_programs_.insert(seen.thread);
      of_libraries_.erase(seen.thread);
    } else if (!seen.call.runs && !BeginsWith(seen.name, kOfGpu) &&
               of_programs_.count(seen.thread) == 0) {
      of_libraries_.insert(seen.thread);
      if (seen.call.polled() >= 0) polled_.insert(seen.call.polled());
    }
    return true;
  });
}

bool Standstill::IsLeftOut(const Seen& seen) {
  // It belongs to a program after all.
  if (seen.call.WaitsForThread()) of_libraries_.erase(seen.thread);
  if (seen.thread.first == getpid()) return false;  // the main thread
  return IsOfLibrary(seen.thread.first, seen.name) ||
         of_libraries_.count(seen.thread) != 0 ||
         polled_.count(seen.call.polled()) != 0;
}

bool Standstill::AllWait(Waits* found, bool* main_runs) {
  Waits& waits = *found;
  waits.clear();
  return ForThreads([&](const Seen& seen) {
    if (IsLeftOut(seen)) return true;
    const bool is_main = seen.thread.first == getpid();
    *main_runs = is_main && seen.call.runs;
    if (is_main && seen.call.LooksForSignals()) {
      // It runs for a moment each time, but comes back to the same wait.
      waits[seen.thread] = StrCat(seen.call.arguments[0], " ", seen.call.arguments[3]);
      return true;
    }
    waits[seen.thread] = seen.switches;
    return seen.call.WaitsForThread() && !seen.switches.empty();
  });
}

bool Standstill::Look() {
  Waits waits;
  bool main_runs = true, all_wait = false;
  // It may be looking for signals just now.
  for (int i = 0; i < kLooksAtMain && main_runs && !all_wait; ++i) {
    if (i > 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    main_runs = false;
    all_wait = AllWait(&waits, &main_runs);
  }
  if (!all_wait) waits.clear();
  const bool unchanged = !waits.empty() && waits == last_;
  last_ = std::move(waits);
  return unchanged;
}

}  // namespace jaxcomm
