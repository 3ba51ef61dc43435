#include "ffi/flight/flight_dump.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <locale>
#include <string>
#include <thread>
#include <vector>

#include "ffi/flight/dump_signal.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

using State = FlightRecorder::State;

// Records, and does nothing else.
class Recording final : public Communicator {
 public:
  using Communicator::Communicator;
  xla::ffi::Future Execute(const Call&) override {
    return FailedFuture(FailedPrecondition("not for this test"));
  }
  void Abort(const Status&) override {}
  CommunicatorStats stats() const override { return {}; }
};

// A folder that is gone afterwards, and this process's dumps in it.
class Folder {
 public:
  Folder() {
    char path[] = "/tmp/flight_dump_test.XXXXXX";
    path_ = mkdtemp(path);
    PrepareFlightDumps({3, 4, {{"cpu", {6, 7}}}}, path_);
  }
  ~Folder() {
    PrepareFlightDumps({}, "");
    Take();
    rmdir(path_.c_str());
  }
  const std::string& path() const { return path_; }
  // The dump, which is deleted; empty if there is none.
  std::string Take() {
    const std::string path = path_ + "/flight-record-3.json";
    std::ifstream file(path);
    std::string text{std::istreambuf_iterator<char>(file), {}};
    if (!text.empty()) unlink(path.c_str());
    return text;
  }

 private:
  std::string path_;
};

bool Holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Whether a number of seconds stands between the two: a machine may be slow.
bool HoldsSeconds(const std::string& text, const std::string& before,
                  const std::string& after) {
  const size_t at = text.find(before);
  if (at == std::string::npos) return false;
  const char* const number = text.c_str() + at + before.size();
  char* end = nullptr;
  const double seconds = std::strtod(number, &end);
  return end != number && seconds >= 0 && seconds < 60 &&
         text.compare(static_cast<size_t>(end - text.c_str()), after.size(), after) ==
             0;
}

std::unique_ptr<CallSite> Sum() {
  return MakeSite("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)});
}

TEST(a_record_is_json_of_all_communicators_or_one) {
  CommunicatorSpec spec = Spec({{6, 7}}, 1.5);
  spec.key = -2;
  spec.axes = "('a\"\\\n',)";
  Recording strange(spec);
  Recording other(Spec({{6}, {7}}));
  auto site = Sum();
  strange.recorder().Finish(strange.recorder().Start(site->operation(), 5, 0x1f, 0, 1),
                            State::kFailed);
  strange.recorder().Start(site->operation(), 5, 0x1f, 0, 0);
  const std::string one = FlightRecordOf(-2, "asked");
  CHECK_TRUE(Holds(one, "\"key\": \"fffffffffffffffe\""));
  CHECK_TRUE(Holds(one, R"json("axes": "('a\"\\\u000a',)")json"));
  CHECK_TRUE(Holds(one, "\"groups\": [[6, 7]], \"timeout_seconds\": 1.500"));
  CHECK_TRUE(Holds(one, "\"site\": \"000000000000001f\""));
  CHECK_TRUE(Holds(one, "\"state\": \"started\""));
  CHECK_TRUE(Holds(one, "\"seconds\": null}"));
  CHECK_TRUE(Holds(one, "\"state\": \"failed\""));
  CHECK_TRUE(!Holds(one, "\"key\": \"0000000000000001\""));
  CHECK_TRUE(
      Holds(FlightRecordOf(std::nullopt, "asked"), "\"key\": \"0000000000000001\""));
}

TEST(a_closed_communicator_is_no_longer_in_the_record) {
  {
    Recording closed(Spec({{0}}));
  }
  CHECK_TRUE(!Holds(FlightRecordOf(std::nullopt, "asked"), "\"key\""));
}

TEST(failures_are_dumped_once_until_a_later_operation_completes) {
  Folder folder;
  Recording communicator(Spec({{6, 7}}));
  auto site = Sum();
  FlightRecorder& recorder = communicator.recorder();
  const auto pending = recorder.Start(site->operation(), 1, 1, 0, 1);
  recorder.Finish(recorder.Start(site->operation(), 1, 1, 0, 0), State::kFailed);
  DumpFlightRecords("timeout");
  const std::string first = folder.Take();
  CHECK_TRUE(Holds(first, "\"reason\": \"timeout\""));
  CHECK_TRUE(Holds(first, "\"process\": 3, \"processes\": 4"));
  CHECK_TRUE(Holds(first, "\"devices\": {\"cpu\": [6, 7]}"));
  // The same failure met by another rank, and what came to its end all the same.
  recorder.Finish(pending, State::kCompleted);
  recorder.Finish(recorder.Start(site->operation(), 2, 1, 0, 0), State::kFailed);
  DumpFlightRecords("mismatch");
  CHECK_EQ(folder.Take(), "");
  // The program goes on, and fails again.
  recorder.Finish(recorder.Start(site->operation(), 3, 1, 0, 0), State::kCompleted);
  recorder.Finish(recorder.Start(site->operation(), 4, 1, 0, 0), State::kFailed);
  DumpFlightRecords("mismatch");
  CHECK_TRUE(Holds(folder.Take(), "\"reason\": \"mismatch\""));
}

class German final : public std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(numbers_are_written_alike_in_every_locale) {
  Recording communicator(Spec({{123456}}, 2.5));
  const std::locale before =
      std::locale::global(std::locale(std::locale::classic(), new German));
  const std::string record = FlightRecordOf(1, "asked");
  std::locale::global(before);
  CHECK_TRUE(Holds(record, "\"groups\": [[123456]], \"timeout_seconds\": 2.500"));
}

TEST(lines_say_what_each_rank_waits_in_or_did_last) {
  CommunicatorSpec spec = Spec({{6, 7}});
  FlightRecorder recorder(spec.groups);
  auto site = Sum();
  for (int i = 0; i < 3; ++i) {
    recorder.Finish(recorder.Start(site->operation(), i, 1, 0, 0), State::kCompleted);
  }
  recorder.Finish(recorder.Start(site->operation(), 0, 1, 0, 1), State::kFailed);
  recorder.Start(site->operation(), 1, 1, 0, 1);
  const std::string lines = FlightRecordLines({{spec, recorder.Snapshot()}});
  CHECK_TRUE(HoldsSeconds(lines,
                          "axes ('x',), lane 'default': rank 0 of 2 (cpu:6) completed "
                          "all_reduce(float32[4]) #3 ",
                          " s ago\n"));
  CHECK_TRUE(HoldsSeconds(
      lines, "rank 1 of 2 (cpu:7) has been in all_reduce(float32[4]) #2 for ", " s\n"));
  CHECK_TRUE(!Holds(lines, "#1 "));
}

TEST(a_file_that_somebody_left_in_the_folder_is_not_written_through) {
  Folder folder;
  const std::string victim = folder.path() + "/victim";
  const std::string part = folder.path() + "/flight-record-3.json.part";
  std::ofstream(victim) << "precious";
  CHECK_EQ(symlink(victim.c_str(), part.c_str()), 0);
  Recording communicator(Spec({{6, 7}}));
  auto site = Sum();
  communicator.recorder().Finish(
      communicator.recorder().Start(site->operation(), 1, 1, 0, 0), State::kCompleted);
  DumpFlightRecords("timeout");
  CHECK_TRUE(Holds(folder.Take(), "\"reason\": \"timeout\""));
  std::ifstream file(victim);
  CHECK_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "precious");
  unlink(victim.c_str());
}

// While it lives, stderr is a full pipe.
class BlockedStderr {
 public:
  BlockedStderr() {
    CHECK_EQ(pipe(ends_), 0);
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

TEST(a_dump_that_cannot_be_written_holds_up_nobody_for_long) {
  Folder folder;
  Recording communicator(Spec({{6, 7}}));
  auto site = Sum();
  FlightRecorder& recorder = communicator.recorder();
  std::atomic<int> returned{0};
  std::vector<std::thread> threads;
  {
    BlockedStderr blocked;
    for (int i = 0; i < 5; ++i) {
      // Each dump is the first for its reason, so it is written.
      recorder.Finish(recorder.Start(site->operation(), 10 + i, 1, 0, 0),
                      State::kCompleted);
      threads.emplace_back([&] {
        DumpFlightRecords("timeout");
        ++returned;
      });
    }
    // Each waits for one second. If they waited for the pipe, none would end.
    CHECK_TRUE(Comes([&] { return returned == 5; }));
  }
  for (std::thread& thread : threads) thread.join();
  // A later dump is written.
  recorder.Finish(recorder.Start(site->operation(), 20, 1, 0, 0), State::kCompleted);
  DumpFlightRecords("mismatch");
  CHECK_TRUE(Holds(folder.Take(), "\"reason\": \"mismatch\""));
}

void Ignored(int) {}

// In a child, whose handlers are its own: what it exits with.
int InChild(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(a_handler_of_the_user_is_left_alone) {
  const int kept = InChild([] {
    signal(SIGUSR1, &Ignored);
    const bool answers = AnswerDumpSignal();
    return answers || signal(SIGUSR1, SIG_DFL) != &Ignored;
  });
  CHECK_EQ(kept, 0);
  const int ignored = InChild([] {
    signal(SIGUSR1, SIG_IGN);
    return AnswerDumpSignal() || signal(SIGUSR1, SIG_DFL) != SIG_IGN;
  });
  CHECK_EQ(ignored, 0);
}

TEST(a_request_does_not_replace_a_record_by_an_empty_one) {
  Folder folder;
  auto site = Sum();
  {
    Recording communicator(Spec({{6, 7}}));
    FlightRecorder& recorder = communicator.recorder();
    recorder.Finish(recorder.Start(site->operation(), 9, 1, 0, 0), State::kCompleted);
    AnswerFlightRequest();
    CHECK_TRUE(Holds(folder.Take(), "\"reason\": \"signal\""));
  }
  // It is closed.
  AnswerFlightRequest();
  CHECK_EQ(folder.Take(), "");
}

TEST(a_signal_is_answered_with_a_file) {
  Folder folder;
  Recording communicator(Spec({{6, 7}}));
  auto site = Sum();
  communicator.recorder().Start(site->operation(), 1, 1, 0, 0);
  CHECK_TRUE(AnswerDumpSignal());
  CHECK_TRUE(AnswerDumpSignal());
  raise(SIGUSR1);
  std::string text;
  CHECK_TRUE(Comes([&] { return !(text = folder.Take()).empty(); }));
  CHECK_TRUE(Holds(text, "\"reason\": \"signal\""));
  // A forked child has no thread to answer it: it ends, as it would without us.
#ifndef __SANITIZE_THREAD__  // which delivers no signal to the fork of several threads
  CHECK_EQ(InChild([] { return raise(SIGUSR1); }), -SIGUSR1);
  CHECK_EQ(folder.Take(), "");
#endif
}

}  // namespace
}  // namespace jaxcomm::testing
