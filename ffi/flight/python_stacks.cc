#include "ffi/flight/python_stacks.h"

#include <dlfcn.h>
#include <poll.h>
#include <unistd.h>

#include "ffi/os/forked.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {
namespace {

constexpr int kPatienceMilliseconds = 500;
constexpr size_t kMostBytes = 1 << 18;

struct Stacks {
  Mutex mutex;
  StackServer server GUARDED_BY(mutex);
};

// Never destroyed: the thread that answers signals may use it when the process ends.
Stacks& Get() {
  static Stacks* const stacks = new Stacks;
  return *stacks;
}

bool IsAnswered(int answer, int milliseconds) {
  pollfd waited{answer, POLLIN, 0};
  return poll(&waited, 1, milliseconds) == 1 && (waited.revents & POLLIN) != 0;
}

// Private to CPython, which exports it up to 3.12.
bool DumpWithoutLock(int file) {
  using Dump = const char* (*)(int, void*, void*);
  const auto dump =
      reinterpret_cast<Dump>(dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
  return dump != nullptr && dump(file, nullptr, nullptr) == nullptr;
}

std::string ContentOf(int file) {
  std::string text(kMostBytes, '\0');
  const ssize_t got = pread(file, text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return text;
}

}  // namespace

void UseStackServer(const StackServer& server) {
  Stacks& stacks = Get();
  MutexLock lock(stacks.mutex);
  stacks.server = server;
}

std::string PythonStacks() {
  if (IsForked()) return "";  // the server is its parent's
  Stacks& stacks = Get();
  MutexLock lock(stacks.mutex);
  const StackServer server = stacks.server;
  if (server.file < 0) return "";
  char byte;
  // Of a request that was answered too late.
  while (IsAnswered(server.answer, 0) && read(server.answer, &byte, 1) == 1) {
  }
  if (ftruncate(server.file, 0) != 0 || write(server.request, "", 1) != 1) return "";
  if (IsAnswered(server.answer, kPatienceMilliseconds)) return ContentOf(server.file);
  const bool dumped = DumpWithoutLock(server.file);
  return ContentOf(server.file) +
         (dumped ? "A thread keeps the interpreter's lock.\n"
                 : "A thread keeps the interpreter's lock: no stacks.\n");
}

}  // namespace jaxcomm
