// Transfers and doorbells, as they are shipped, under every schedule of two processes
// up to some surprises. See schedules.h.
#include "ffi/backends/host/arena/stream_plan.h"
#include "ffi/backends/host/reduce/execute.h"
#include "ffi/core/hash.h"
#include "ffi/os/cores.h"
#include "ffi/os/forked.h"
#include "ffi/os/segment.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"
#include "tests/ffi/schedules.h"

// The sanitizers do not follow contexts that change.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

namespace explored {
namespace jaxcomm {
using namespace ::jaxcomm;
}  // namespace jaxcomm
// clang-format off
#include "ffi/backends/host/arena/doorbell.h"
#include "ffi/backends/host/arena/arena_memory.h"
#include "ffi/backends/host/arena/arena.h"
#include "ffi/backends/host/arena/transfer.h"
#include "ffi/backends/host/arena/doorbell.cc"
#include "ffi/backends/host/arena/arena_memory.cc"
#include "ffi/backends/host/arena/arena.cc"
#include "ffi/backends/host/arena/transfer.cc"
// clang-format on
}  // namespace explored

namespace jaxcomm::testing {
namespace {

namespace shared = explored::jaxcomm;
using explored::Explorer;

struct OpenArena : shared::Arena {
  using Arena::Arena;
  using ArenaMemory::crossing;
  using ArenaMemory::header;
};

// Two processes that meet in one place of their program.
class Meeting {
 public:
  // `elements` floats of each: few lie in the crossing, many are streamed.
  explicit Meeting(int64_t elements, const std::string& collective = "all_reduce",
                   std::vector<int64_t> params = {})
      : elements_(elements), site_(FloatSite(collective, std::move(params), elements)) {
    shared::Arena::Format(*segment_);
    plan_ = Must(MakeHostPlan(*site_, 2, nullptr));
    for (int process : {0, 1}) {
      arenas_.push_back(new OpenArena(segment_, {0, 1}, process));
      streams_.push_back(MakeStreamPlan(plan_, site_->results(), {0, 1}, process));
    }
  }

  shared::Transfer& transfer(int process) { return transfers_[process]; }
  float result(int process) const { return results_[process][elements_ - 1]; }

  // As before the processes met. What an earlier call left lies where operands go.
  void Reset(uint64_t signature_of_1 = 1) {
    OpenArena& arena = *arenas_[0];
    for (int i = 0; i < shared::kCrossings; ++i) {
      shared::Crossing* const crossing = arena.crossing(i);
      if (crossing->state == shared::Crossing::kOpen || i == used_) {
        crossing->state = shared::Crossing::kFree;
        for (int process : {0, 1}) {
          std::fill_n(reinterpret_cast<float*>(arena.inline_data(crossing, process)), 8,
                      1000.0f);
        }
        used_ = i;
      }
    }
    arena.header().channels = 0;
    arena.header().first.process = 0;
    for (int process : {0, 1}) {
      new (&arena.process(process).doorbell) shared::Doorbell;
      operands_[process].assign(elements_, 1.0f);
      results_[process].assign(elements_, -1.0f);
      operand_[process][0] = operands_[process].data();
      result_[process][0] = results_[process].data();
      shared::CrossingRequest request;
      request.key = {1, 2, 3, 4};
      request.members = 3;
      request.signature = process == 0 ? 1 : signature_of_1;
      request.call = "call";
      transfers_[process].Begin(
          arenas_[process], request, streams_[process],
          {&plan_, &site_->results(), ReduceOp::kSum, operands_of_, results_of_});
    }
  }

  // As ProcessSet::RunBriefly().
  void Spin(int process) {
    using Outcome = shared::Transfer::Outcome;
    Explorer& explorer = *Explorer::Running();
    while (true) {
      const uint64_t seen = explorer.changes();
      const Outcome outcome = transfers_[process].Step();
      if (outcome == Outcome::kDone) return;
      if (outcome == Outcome::kMoved) continue;
      explorer.WaitUntil([&explorer, seen] { return explorer.changes() != seen; });
    }
  }
  // As ProcessSet::State::Progress().
  void Sleep(int process) {
    using Outcome = shared::Transfer::Outcome;
    shared::Transfer& transfer = transfers_[process];
    shared::Doorbell& doorbell = arenas_[process]->process(process).doorbell;
    while (true) {
      const uint32_t seen = doorbell.rings();
      const Outcome outcome = transfer.Step();
      if (outcome == Outcome::kDone) return;
      if (outcome == Outcome::kMoved) continue;
      doorbell.FallAsleep(/*is_idle=*/false);
      const Outcome again = transfer.Step();
      if (again == Outcome::kIdle) doorbell.Sleep(seen, 60);
      doorbell.WakeUp();
      if (again == Outcome::kDone) return;
    }
  }

 private:
  const int64_t elements_;
  const std::unique_ptr<CallSite> site_;
  // Of zeros, in which shared::Arena's counters lie as its own std::atomic has them.
  const std::shared_ptr<Segment> segment_ =
      Must(Segment::Create(shared::Arena::Bytes(2), false));
  HostPlan plan_;
  std::vector<StreamPlan> streams_;
  std::vector<OpenArena*> arenas_;  // never destroyed: no schedule is under way then
  int used_ = -1;
  shared::Transfer transfers_[2];
  std::vector<float> operands_[2], results_[2];
  const void* operand_[2][1];
  void* result_[2][1];
  const void* const* operands_of_[2] = {operand_[0], operand_[1]};
  void* const* results_of_[2] = {result_[0], result_[1]};
};

constexpr int64_t kFew = 4, kMany = 10000, kTwoChunks = 40000;

// Runs two threads under all schedules; `check` looks at each one's end.
void Explore(Meeting& meeting, int most_surprises, uint64_t signature_of_1,
             const std::vector<std::function<void()>>& threads,
             const std::function<void()>& check) {
  Explorer explorer(most_surprises);
  const int before = Failures();
  do {
    meeting.Reset(signature_of_1);
    CHECK_TRUE(explorer.Run(threads));  // otherwise all sleep
    if (Failures() == before) check();
  } while (Failures() == before && explorer.Next());
  std::printf("       %lld schedules\n", static_cast<long long>(explorer.runs()));
  CHECK_TRUE(explorer.runs() > 100);
}

TEST(processes_that_call_different_things_get_no_number) {
  Meeting meeting(kFew);
  Explore(meeting, 2, /*signature_of_1=*/2,
          {[&] { meeting.Spin(0); }, [&] { meeting.Spin(1); }}, [&] {
            for (int process : {0, 1}) {
              CHECK_CONTAINS(TextOf(meeting.transfer(process).status()), "called call");
              CHECK_EQ(meeting.result(process), -1.0f);
            }
          });
}

TEST(processes_that_sleep_are_woken_and_get_the_sum) {
  for (const int64_t elements : {kFew, kMany}) {
    Meeting meeting(elements);
    Explore(meeting, 2, 1, {[&] { meeting.Sleep(0); }, [&] { meeting.Sleep(1); }}, [&] {
      for (int process : {0, 1}) {
        CHECK_OK(meeting.transfer(process).status());
        CHECK_EQ(meeting.result(process), 2.0f);
      }
    });
  }
}

TEST(a_process_that_only_reads_is_woken_for_each_chunk) {
  Meeting meeting(kTwoChunks, "permute", {-1, 0});
  Explore(meeting, 2, 1, {[&] { meeting.Sleep(1); }, [&] { meeting.Sleep(0); }}, [&] {
    for (int process : {0, 1}) CHECK_OK(meeting.transfer(process).status());
    CHECK_EQ(meeting.result(1), 1.0f);
  });
}

TEST(a_process_that_gives_up_leaves_others_the_sum_or_an_error) {
  for (const int64_t elements : {kFew, kMany}) {
    Meeting meeting(elements);
    const auto give_up = [&] {
      meeting.transfer(1).Step();
      meeting.transfer(1).Fail(FailedPrecondition("it gave up"));
    };
    Explore(meeting, 2, 1, {[&] { meeting.Sleep(0); }, give_up}, [&] {
      for (int process : {0, 1}) {
        const std::string text = TextOf(meeting.transfer(process).status());
        if (text.empty()) CHECK_EQ(meeting.result(process), 2.0f);
        if (!text.empty()) CHECK_CONTAINS(text, "it gave up");
      }
    });
  }
}

}  // namespace
}  // namespace jaxcomm::testing

#endif
