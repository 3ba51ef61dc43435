// The few lines of test framework the C++ tests need: no dependency to install on
// a machine that has a compiler and nothing else. Tests take the standard library's
// usual headers from here and from ranks.h.
#ifndef JAXCOMM_TESTS_FFI_CHECK_H_
#define JAXCOMM_TESTS_FFI_CHECK_H_

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/ffi/waiting.h"

namespace jaxcomm::testing {

inline constexpr int kInThisProcess = -1;

struct Test {
  const char* name;
  std::function<void()> body;
  int status = kInThisProcess;  // else of a process of its own, in which it runs
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

inline int& Failures() {
  static int failures = 0;
  return failures;
}

// What must hold after each test.
inline std::vector<std::function<void()>>& AfterEach() {
  static std::vector<std::function<void()>> checks;
  return checks;
}

struct Register {
  Register(const char* name, std::function<void()> body, int status = kInThisProcess) {
    Tests().push_back({name, std::move(body), status});
  }
};

template <typename A, typename B>
void CheckEqual(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << file << ":" << line << ": " << text << ": " << a << " against " << b;
  std::fprintf(stderr, "%s\n", out.str().c_str());
  ++Failures();
}

inline void CheckContains(const std::string& text, const std::string& part,
                          const char* file, int line) {
  if (text.find(part) != std::string::npos) return;
  std::fprintf(stderr, "%s:%d: no '%s' in: %s\n", file, line, part.c_str(),
               text.c_str());
  ++Failures();
}

// The text of an error; "" for success.
template <typename Status>
std::string TextOf(const Status& status) {
  return status.success() ? "" : std::string(status.message());
}

// The value of an ErrorOr. Without one the test cannot go on.
template <typename Result>
auto Must(Result result) {
  if (result.has_value()) return std::move(*result);
  std::fprintf(stderr, "%s\n", std::string(result.error().message()).c_str());
  std::exit(EXIT_FAILURE);
}

// The exit status of a process; minus the signal that ended it.
inline int StatusOf(pid_t child) {
  int status = 0;
  if (child <= 0 || waitpid(child, &status, 0) != child) return EXIT_FAILURE;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// A process that does something and ends, or lives until it is killed.
class Child {
 public:
  explicit Child(const std::function<void()>& body = &Forever) {
    std::fflush(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    Failures() = 0;
    body();
    std::fflush(nullptr);
    _exit(Failures() == 0 ? EXIT_SUCCESS : EXIT_FAILURE);
  }
  ~Child() { Kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  int Wait() { return StatusOf(std::exchange(pid_, 0)); }
  void Kill() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    Wait();
  }

 private:
  pid_t pid_;
};

// While it lives, stderr is a full pipe that nobody reads.
class BlockedStderr {
 public:
  BlockedStderr() {
    if (pipe(ends_) != 0) std::exit(EXIT_FAILURE);
    before_ = dup(STDERR_FILENO);
    fcntl(ends_[1], F_SETFL, O_NONBLOCK);
    while (write(ends_[1], "xxxxxxxx", 8) > 0) continue;
    fcntl(ends_[1], F_SETFL, 0);
    dup2(ends_[1], STDERR_FILENO);
  }
  ~BlockedStderr() {
    dup2(before_, STDERR_FILENO);
    close(ends_[1]);
    close(before_);
    char bytes[4096];
    // Until no writer is left, the one that was blocked included.
    while (read(ends_[0], bytes, sizeof(bytes)) > 0) continue;
    close(ends_[0]);
  }

 private:
  int ends_[2];
  int before_;
};

// A process that runs one test; 0 if none can be had.
inline pid_t StartAlone(const Test& test) {
  char program[] = "/proc/self/exe";
  char* const arguments[] = {program, const_cast<char*>(test.name), nullptr};
  pid_t child = 0;
  std::fflush(nullptr);
  const int error = posix_spawn(&child, program, nullptr, nullptr, arguments, environ);
  return error == 0 ? child : 0;
}

inline void Run(const Test& test) {
  test.body();
  for (const auto& check : AfterEach()) check();
}

// Without a name: all tests.
inline int RunAll(const char* name) {
  // All at the start: most of what they do is to wait for a timeout.
  std::vector<pid_t> alone;
  for (const Test& test : Tests()) {
    const bool starts = name == nullptr && test.status != kInThisProcess;
    alone.push_back(starts ? StartAlone(test) : 0);
  }
  for (size_t i = 0; i < Tests().size(); ++i) {
    const Test& test = Tests()[i];
    const int before = Failures();
    if (name != nullptr) {
      if (std::strcmp(name, test.name) != 0) continue;
      Run(test);
      // At once: what the test leaves behind may never end.
      std::fflush(nullptr);
      _exit(Failures() == 0 ? EXIT_SUCCESS : EXIT_FAILURE);
    }
    if (test.status == kInThisProcess) {
      Run(test);
    } else {
      CheckEqual(StatusOf(alone[i]), test.status, test.name, __FILE__, __LINE__);
    }
    std::printf("%s %s\n", Failures() == before ? "ok    " : "FAILED", test.name);
  }
  std::printf("%zu tests, %d failed checks\n", Tests().size(), Failures());
  return Failures() == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace jaxcomm::testing

#define TEST(name)                                                         \
  static void name();                                                      \
  static const ::jaxcomm::testing::Register register_##name(#name, &name); \
  static void name()
// In a process of its own, which ends with this status.
#define TEST_ALONE(name, status)                                                   \
  static void name();                                                              \
  static const ::jaxcomm::testing::Register register_##name(#name, &name, status); \
  static void name()
#define CHECK_EQ(a, b) \
  ::jaxcomm::testing::CheckEqual((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_TRUE(a) \
  ::jaxcomm::testing::CheckEqual(static_cast<bool>(a), true, #a, __FILE__, __LINE__)
#define CHECK_CONTAINS(text, part) \
  ::jaxcomm::testing::CheckContains((text), (part), __FILE__, __LINE__)
#define CHECK_OK(status) CHECK_EQ(::jaxcomm::testing::TextOf(status), "")
#define CHECK_FAILS(status, part) \
  CHECK_CONTAINS(::jaxcomm::testing::TextOf(status), part)

namespace jaxcomm::testing {

// One waits, in this process or in a child, until another tells it to go on.
struct Pipe {
  Pipe() { CHECK_EQ(pipe(ends), 0); }
  void Tell() const { CHECK_EQ(write(ends[1], "g", 1), 1); }
  void Wait() const {
    char byte = 0;
    CHECK_EQ(read(ends[0], &byte, 1), 1);
  }
  int ends[2];
};

}  // namespace jaxcomm::testing

int main(int count, char** arguments) {
  return ::jaxcomm::testing::RunAll(count > 1 ? arguments[1] : nullptr);
}

#endif  // JAXCOMM_TESTS_FFI_CHECK_H_
