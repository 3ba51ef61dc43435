#include "tests/doubles/nccl/processes.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace jaxcomm::fake {
namespace {

// From /proc/<pid>/stat: the state and the start time. False if there is no process.
bool Look(int pid, char* state, uint64_t* start_time) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char text[1024];
  const ssize_t bytes = read(fd, text, sizeof(text) - 1);
  close(fd);
  if (bytes <= 0) return false;
  text[bytes] = '\0';
  // The second field is the program's name and may contain anything, also ")".
  const char* field = std::strrchr(text, ')');
  if (field == nullptr) return false;
  *state = field[2];
  constexpr int kStartTime = 22;  // counted from 1, as proc(5) does
  for (int i = 2; i < kStartTime && field != nullptr; ++i) {
    field = std::strchr(field + 1, ' ');
  }
  if (field == nullptr) return false;
  *start_time = std::strtoull(field + 1, nullptr, 10);
  return true;
}

}  // namespace

Process ThisProcess() {
  // Where Yama guards memory, siblings may read it only if asked in.
  (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  Process process{getpid(), 0};
  char state = 0;
  (void)Look(process.pid, &state, &process.start_time);
  return process;
}

bool IsAlive(const Process& process) {
  char state = 0;
  uint64_t start_time = 0;
  return Look(process.pid, &state, &start_time) && start_time == process.start_time &&
         state != 'Z' && state != 'X';
}

int ReadMemory(const Process& process, uint64_t address, void* to, size_t bytes) {
  auto* out = static_cast<char*>(to);
  while (bytes > 0) {
    iovec local{out, bytes};
    iovec remote{reinterpret_cast<void*>(address), bytes};
    const ssize_t read = process_vm_readv(process.pid, &local, 1, &remote, 1, 0);
    if (read < 0) return errno;
    if (read == 0) return EFAULT;
    out += read;
    address += static_cast<uint64_t>(read);
    bytes -= static_cast<size_t>(read);
  }
  return 0;
}

}  // namespace jaxcomm::fake
