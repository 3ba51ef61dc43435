#include "ffi/flight/flight_dump.h"

#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <locale>

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
    PrepareFlightDumps({3, 4, {{"cpu", {6, 7}}}}, path_, /*says=*/true);
  }
  ~Folder() {
    PrepareFlightDumps({}, "", /*says=*/true);
    Take();
    rmdir(path_.c_str());
  }
  const std::string& path() const { return path_; }
  // The next dump. A disk may be slow: nobody waits for it longer than a second.
  std::string Next() {
    std::string text;
    CHECK_TRUE(Until([&] { return !(text = Take()).empty(); }));
    return text;
  }
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

// A sum of a run, as one rank, and how it ended.
FlightRecorder::Ticket Start(FlightRecorder& recorder, int64_t run, int rank = 0,
                             uint64_t tag = 1) {
  static const auto& site = *FloatSite("all_reduce", {}, 4).release();
  return recorder.Start(site.operation(), run, tag, 0, rank);
}

void Record(FlightRecorder& recorder, int64_t run, State state, int rank = 0) {
  recorder.Finish(Start(recorder, run, rank), state);
}

class German final : public std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(any_text_and_any_key_are_json_in_every_locale) {
  CommunicatorSpec spec = Spec({{123456}}, 2.5);
  spec.key = -2;
  spec.axes = "('a\"\\\n',)";
  Recording strange(spec);
  Start(strange.recorder(), 5, 0, 0x1f);
  const std::locale before =
      std::locale::global(std::locale(std::locale::classic(), new German));
  const std::string record = FlightRecordOf(-2, "asked");
  std::locale::global(before);
  CHECK_CONTAINS(record, "\"key\": \"fffffffffffffffe\"");
  CHECK_CONTAINS(record, R"json("axes": "('a\"\\\u000a',)")json");
  CHECK_CONTAINS(record, "\"site\": \"000000000000001f\"");
  CHECK_CONTAINS(record, "\"seconds\": null}");
  CHECK_CONTAINS(record, "\"groups\": [[123456]], \"timeout_seconds\": 2.500");
}

TEST(failures_are_dumped_once_until_what_comes_later) {
  Folder folder;
  Recording communicator(Spec({{6, 7}}));
  FlightRecorder& recorder = communicator.recorder();
  const auto pending = Start(recorder, 1, 1);
  Record(recorder, 1, State::kFailed);
  DumpFlightRecords("timeout");
  const std::string first = folder.Next();
  CHECK_CONTAINS(first, "\"reason\": \"timeout\"");
  CHECK_CONTAINS(first, "\"process\": 3, \"processes\": 4");
  CHECK_CONTAINS(first, "\"devices\": {\"cpu\": [6, 7]}");
  // The same failure met by another rank, and what came to its end all the same.
  recorder.Finish(pending, State::kCompleted);
  Record(recorder, 2, State::kFailed);
  DumpFlightRecords("mismatch");
  CHECK_EQ(folder.Take(), "");
  // The program goes on, and fails again.
  Record(recorder, 3, State::kCompleted);
  Record(recorder, 4, State::kFailed);
  DumpFlightRecords("mismatch");
  CHECK_CONTAINS(folder.Next(), "\"reason\": \"mismatch\"");
  // It begins anew, and fails at once.
  Recording anew(Spec({{6, 7}}));
  Record(anew.recorder(), 1, State::kFailed);
  DumpFlightRecords("timeout");
  CHECK_CONTAINS(folder.Next(), "\"reason\": \"timeout\"");
}

TEST(a_file_that_somebody_left_in_the_folder_is_not_written_through) {
  Folder folder;
  const std::string victim = folder.path() + "/victim";
  const std::string part = folder.path() + "/flight-record-3.json.part";
  std::ofstream(victim) << "precious";
  CHECK_EQ(symlink(victim.c_str(), part.c_str()), 0);
  Recording communicator(Spec({{6, 7}}));
  Record(communicator.recorder(), 1, State::kCompleted);
  DumpFlightRecords("timeout");
  CHECK_CONTAINS(folder.Next(), "\"reason\": \"timeout\"");
  std::ifstream file(victim);
  CHECK_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "precious");
  unlink(victim.c_str());
}

TEST(a_dump_that_cannot_be_written_holds_up_nobody_for_long) {
  Folder folder;
  Recording communicator(Spec({{6, 7}}));
  FlightRecorder& recorder = communicator.recorder();
  std::atomic<int> returned{0};
  std::vector<std::thread> threads;
  {
    BlockedStderr blocked;
    for (int i = 0; i < 5; ++i) {
      // Each dump is the first for its reason, so it is written.
      Record(recorder, 10 + i, State::kCompleted);
      threads.emplace_back([&] {
        DumpFlightRecords("timeout");
        ++returned;
      });
    }
    // Each waits for one second. If they waited for the pipe, none would end.
    CHECK_TRUE(Until([&] { return returned == 5; }));
  }
  for (std::thread& thread : threads) thread.join();
  // A later dump is written.
  Record(recorder, 20, State::kCompleted);
  DumpFlightRecords("mismatch");
  CHECK_CONTAINS(folder.Next(), "\"reason\": \"mismatch\"");
}

void Ignored(int) {}

TEST(a_handler_of_the_user_is_left_alone) {
  for (const auto handler : {&Ignored, SIG_IGN}) {
    CHECK_EQ(Child([&] {
               signal(SIGUSR1, handler);
               CHECK_TRUE(!AnswerDumpSignal());
               CHECK_TRUE(signal(SIGUSR1, SIG_DFL) == handler);
             }).Wait(),
             EXIT_SUCCESS);
  }
}

TEST(a_signal_is_answered_with_a_file_which_keeps_what_was_closed) {
  Folder folder;
  auto communicator = std::make_unique<Recording>(Spec({{6, 7}}));
  Start(communicator->recorder(), 1);
  CHECK_TRUE(AnswerDumpSignal());
  CHECK_TRUE(AnswerDumpSignal());
  raise(SIGUSR1);
  CHECK_CONTAINS(folder.Next(), "\"closed\": false, \"entries\": [\n    {");
  // A forked child has no thread to answer it: it ends, as it would without us.
#ifndef __SANITIZE_THREAD__  // which delivers no signal to the fork of several threads
  CHECK_EQ(Child([] { raise(SIGUSR1); }).Wait(), -SIGUSR1);
#endif
  communicator = nullptr;  // closed
  AnswerFlightRequest();
  const std::string closed = folder.Next();
  CHECK_CONTAINS(closed, "\"reason\": \"signal\"");
  CHECK_CONTAINS(closed, "\"closed\": true, \"entries\": [\n    {");
  // But whoever asks in the program sees those that live.
  CHECK_TRUE(FlightRecordOf(std::nullopt, "asked").find("entries") ==
             std::string::npos);
  // A process that ends well writes it too. Made anew, its history begins anew.
  DumpFlightRecords(kExitWell);
  CHECK_CONTAINS(folder.Next(), "\"reason\": \"exit\"");
  Recording anew(Spec({{6, 7}}));
  AnswerFlightRequest();
  CHECK_TRUE(folder.Next().find("\"device\": 6,") == std::string::npos);
}

}  // namespace
}  // namespace jaxcomm::testing
