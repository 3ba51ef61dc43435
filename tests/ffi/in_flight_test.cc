// Tests what a rank knows of the operations that its device has yet to finish.
#include "ffi/backends/nccl/queue/in_flight.h"

#include <chrono>
#include <deque>

#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

using State = FlightRecorder::State;
using Clock = InFlight::Clock;

// The clock is the test's.
constexpr Clock::time_point kStart{std::chrono::hours(1000)};
constexpr auto kPatience = std::chrono::seconds(50);

// A device whose streams come as far as a test lets them. An event is the number of the
// record of it on a stream.
struct Device {
  struct Event {
    int stream = 0;
    int64_t place = 0;
  };
  std::deque<Event> events;
  int64_t recorded[32] = {};  // by stream
  int64_t done[32] = {};
  int queries = 0;
  cuda::Result fails = cuda::kSuccess;
};

Device* device = nullptr;
// Runs while the driver makes the caller of cuEventRecord wait.
std::function<void()> meanwhile;

cuda::Stream StreamOf(int number) { return reinterpret_cast<cuda::Stream>(number); }

NcclLibrary Driver() {
  NcclLibrary library;
  library.cuda.EventCreate = [](cuda::Event* event, unsigned) {
    device->events.emplace_back();
    *event = reinterpret_cast<cuda::Event>(&device->events.back());
    return cuda::kSuccess;
  };
  library.cuda.EventDestroy = [](cuda::Event) { return cuda::kSuccess; };
  library.cuda.GetErrorString = [](cuda::Result, const char** text) {
    *text = "it failed";
    return cuda::kSuccess;
  };
  library.cuda.StreamIsCapturing = [](cuda::Stream, cuda::CaptureStatus* status) {
    *status = cuda::kCaptureNone;
    return cuda::kSuccess;
  };
  library.cuda.EventRecord = [](cuda::Event event, cuda::Stream stream) {
    const auto number = static_cast<int>(reinterpret_cast<intptr_t>(stream));
    if (meanwhile) meanwhile();
    *reinterpret_cast<Device::Event*>(event) = {number, ++device->recorded[number]};
    return cuda::kSuccess;
  };
  library.cuda.EventQuery = [](cuda::Event event) {
    const auto& of = *reinterpret_cast<Device::Event*>(event);
    ++device->queries;
    if (device->fails != cuda::kSuccess) return device->fails;
    return device->done[of.stream] >= of.place ? cuda::kSuccess : cuda::kNotReady;
  };
  return library;
}

struct Rank {
  Device own;
  Clock::time_point clock = kStart;
  uint64_t operations = 0;
  OneShotProgress progress;
  uint32_t flag = 0;  // of the last sum
  NcclLibrary library = Driver();
  FlightRecorder recorder{{{0}}};
  InFlight in_flight{library, recorder};
  std::unique_ptr<CallSite> site = FloatSite("all_reduce", {}, 4);

  Rank() {
    device = &own;
    in_flight.Prepare();
  }
  ~Rank() { in_flight.Release(); }

  // Gives a stream operations, each this long after the one before.
  void Give(int stream, int times = 1,
            Clock::duration later = std::chrono::milliseconds(1)) {
    for (int i = 0; i < times; ++i) {
      const auto ticket = recorder.Start(site->operation(), 1, 2, 0, 0);
      clock += later;
      in_flight.Begin(StreamOf(stream), false, clock);
      in_flight.End(StreamOf(stream), {ticket, site->operation(), ++operations}, clock);
    }
  }
  // Gives a stream a small sum, which tells how far it is.
  void GiveSum(int stream, uint32_t arrays = 1) {
    const auto ticket = recorder.Start(site->operation(), 1, 2, 0, 0);
    in_flight.Add(StreamOf(stream), {ticket, site->operation(), ++operations},
                  {&progress, flag + 1, flag + arrays});
    flag += arrays;
  }
  // What the kernel of a sum does at its end, block by block.
  void EndSums(uint32_t until) {
    for (uint32_t& ended : progress.ended) ended = until;
  }
  // Lets a stream finish this many of its operations, with two events each.
  void Finish(int stream, int operations) { own.done[stream] += 2 * operations; }

  int Completed() {
    int count = 0;
    for (const auto& entry : recorder.Snapshot()) {
      count += entry.state == State::kCompleted;
    }
    return count;
  }
  int Refreshed() {
    in_flight.Refresh();
    return Completed();
  }
};

TEST(those_that_are_done_are_told) {
  Rank rank;
  rank.Give(1, 50);
  for (const int more : {0, 1, 20, 28, 1}) {
    rank.Finish(1, more);
    CHECK_EQ(rank.Refreshed(), static_cast<int>(rank.own.done[1] / 2));
    CHECK_EQ(rank.in_flight.size(), 50 - rank.Completed());
  }
}

TEST(a_sum_takes_no_event_and_tells_how_far_it_is) {
  Rank rank;
  for (int i = 0; i < 3; ++i) rank.GiveSum(1);
  CHECK_EQ(rank.own.recorded[1], 0);
  CHECK_EQ(rank.in_flight.size(), 3);
  rank.EndSums(2);
  rank.progress.ended[7] = 1;  // a block of the second is still at work
  CHECK_EQ(rank.Refreshed(), 1);
  rank.EndSums(2);
  CHECK_EQ(rank.Refreshed(), 2);
  rank.EndSums(3);
  CHECK_EQ(rank.Refreshed(), 3);
  CHECK_EQ(rank.in_flight.size(), 0);
  CHECK_EQ(rank.own.queries, 0);
}

TEST(a_sum_is_late_once_it_has_begun) {
  Rank rank;
  rank.GiveSum(1);
  rank.GiveSum(1);
  // Other work of the stream comes first, for an hour.
  const auto later = kStart + std::chrono::hours(1);
  CHECK_EQ(rank.in_flight.Poll(kStart, kPatience).found, false);
  CHECK_EQ(rank.in_flight.Poll(later, kPatience).found, false);
  rank.EndSums(1);
  rank.progress.began = 2;
  CHECK_EQ(rank.in_flight.Poll(later, kPatience).found, false);
  const InFlight::Overdue overdue =
      rank.in_flight.Poll(later + 2 * kPatience, kPatience);
  CHECK_EQ(overdue.found, true);
  CHECK_EQ(overdue.sequence, 2u);
}

// The first may wait for another rank, and keep the others from beginning.
TEST(a_sum_of_several_arrays_is_late_from_its_first_on_and_done_with_its_last) {
  Rank rank;
  rank.GiveSum(1, 3);
  rank.progress.began = 1;
  CHECK_EQ(rank.in_flight.Poll(kStart, kPatience).found, false);
  CHECK_EQ(rank.in_flight.Poll(kStart + 2 * kPatience, kPatience).found, true);
  rank.EndSums(2);
  CHECK_EQ(rank.Refreshed(), 0);
  rank.EndSums(3);
  CHECK_EQ(rank.Refreshed(), 1);
}

TEST(a_device_that_fails_while_a_sum_runs_is_noticed) {
  Rank rank;
  rank.GiveSum(1);
  CHECK_EQ(rank.in_flight.Poll(rank.clock, kPatience).found, false);
  rank.own.fails = static_cast<cuda::Result>(716);
  const InFlight::Overdue overdue = rank.in_flight.Poll(rank.clock, kPatience);
  CHECK_EQ(overdue.found, true);
  CHECK_TRUE(overdue.status.failure());
}

// The last entry stands for what follows it, of either kind.
TEST(sums_and_others_share_entries) {
  for (const bool ends_with_sum : {false, true}) {
    Rank rank;
    const int count = rank.in_flight.capacity() - 1;
    rank.Give(1, count);
    for (int i = 0; i < 3; ++i) {
      rank.GiveSum(1);
      if (!ends_with_sum || i < 2) rank.Give(1);
    }
    CHECK_EQ(rank.in_flight.size(), rank.in_flight.capacity());
    rank.own.done[1] = 2 * count;
    rank.EndSums(2);
    CHECK_EQ(rank.Refreshed(), count);
    rank.own.done[1] = rank.own.recorded[1];
    rank.in_flight.Refresh();
    if (ends_with_sum) {
      CHECK_EQ(rank.in_flight.size(), 1);
      rank.EndSums(3);
      rank.in_flight.Refresh();
    }
    CHECK_EQ(rank.in_flight.size(), 0);
    CHECK_EQ(rank.Completed(), static_cast<int>(rank.operations));
    rank.GiveSum(1);  // an entry forgets what it stood for
    rank.EndSums(rank.flag);
    rank.Give(1);
    rank.in_flight.Refresh();
    CHECK_EQ(rank.in_flight.size(), 1);
  }
}

TEST(one_stream_says_nothing_of_another) {
  Rank rank;
  rank.Give(1, 3);
  rank.Give(2, 3);
  rank.Give(1, 3);
  rank.Finish(2, 3);
  rank.in_flight.Refresh();
  // They are told in the order they were given.
  CHECK_EQ(rank.Completed(), 0);
  rank.Finish(1, 4);
  CHECK_EQ(rank.Refreshed(), 7);
}

TEST(a_device_that_is_done_is_asked_little) {
  Rank rank;
  const int count = rank.in_flight.capacity();
  rank.Give(1, count);
  rank.Finish(1, count);
  rank.own.queries = 0;
  rank.Give(1);
  CHECK_EQ(rank.own.queries, 2);
  CHECK_EQ(rank.in_flight.size(), 1);
}

TEST(there_may_be_more_operations_than_entries) {
  Rank rank;
  const int count = 3 * rank.in_flight.capacity();
  rank.Give(1, count);
  CHECK_EQ(rank.in_flight.size(), rank.in_flight.capacity());
  CHECK_EQ(rank.Refreshed(), 0);
  // Those that share the last entry are given one event each: their end.
  rank.own.done[1] = rank.own.recorded[1];
  rank.in_flight.Refresh();
  CHECK_EQ(rank.in_flight.size(), 0);
  CHECK_EQ(rank.Completed(), count);
}

TEST(those_that_the_recorder_has_forgotten_are_left_out) {
  Rank rank;
  const int kept = rank.recorder.entries_per_rank();
  rank.Give(1, kept + 100);
  CHECK_EQ(rank.Completed(), 0);
  rank.own.done[1] = rank.own.recorded[1];
  CHECK_EQ(rank.Refreshed(), kept);
  rank.Give(1, 2);
  rank.Finish(1, 1);
  CHECK_EQ(rank.Refreshed(), kept - 1);
}

// The first hangs, nothing follows it on its stream, and another stream goes on.
TEST(an_operation_hides_none_of_another_stream) {
  for (const bool are_sums : {false, true}) {
    Rank rank;
    const int count = rank.in_flight.capacity() - 1;
    rank.Give(1, count);
    are_sums ? rank.GiveSum(2) : rank.Give(2);
    rank.Give(1, 5);
    CHECK_EQ(rank.in_flight.size(), count + 2);
    rank.own.done[1] = rank.own.recorded[1];
    rank.own.done[2] = 1;
    rank.progress.began = 1;
    CHECK_EQ(rank.in_flight.Poll(rank.clock, kPatience).found, false);
    CHECK_EQ(rank.Completed(), count);
    const auto overdue = rank.in_flight.Poll(rank.clock + 2 * kPatience, kPatience);
    CHECK_EQ(overdue.found, true);
    CHECK_EQ(overdue.sequence, static_cast<uint64_t>(count) + 1);
    rank.own.done[2] = 2;
    rank.EndSums(1);
    CHECK_EQ(rank.Refreshed(), count + 6);
    CHECK_EQ(rank.in_flight.size(), 0);
  }
}

// Likewise, where the other stream has the last entry by then.
TEST(an_operation_that_shares_an_entry_is_late_too) {
  Rank rank;
  const int count = rank.in_flight.capacity() - 1;
  rank.Give(1, count);
  for (int i = 0; i < 3; ++i) {
    rank.Give(1);
    rank.Give(2);
  }
  CHECK_EQ(rank.in_flight.size(), count + 2);
  rank.own.done[1] = rank.own.recorded[1] - 1;  // the last of the first stream hangs
  rank.own.done[2] = rank.own.recorded[2];
  CHECK_EQ(rank.in_flight.Poll(rank.clock, kPatience).found, false);
  CHECK_EQ(rank.Completed(), count);
  CHECK_EQ(rank.in_flight.Poll(rank.clock + 2 * kPatience, kPatience).found, true);
  rank.own.done[1] = rank.own.recorded[1];
  CHECK_EQ(rank.Refreshed(), count + 6);
}

TEST(too_many_streams_are_refused) {
  Rank rank;
  const int streams = rank.in_flight.most_streams();
  rank.Give(1, rank.in_flight.capacity() - 1);
  for (int stream = 1; stream <= streams; ++stream) rank.Give(stream);
  CHECK_TRUE(rank.in_flight.Begin(StreamOf(streams + 1), false, rank.clock).failure());
  CHECK_TRUE(rank.in_flight.Begin(StreamOf(streams), false, rank.clock).success());
  rank.own.done[1] = rank.own.recorded[1];
  CHECK_TRUE(rank.in_flight.Begin(StreamOf(streams + 1), false, rank.clock).success());
}

TEST(late_is_what_runs_for_too_long_not_what_waits) {
  Rank rank;
  rank.Give(1, 2);
  // Other work of the stream comes first, for an hour.
  const auto later = kStart + std::chrono::hours(1);
  CHECK_EQ(rank.in_flight.Poll(later, kPatience).found, false);
  rank.own.done[1] = 1;  // the first has begun
  CHECK_EQ(rank.in_flight.Poll(later, kPatience).found, false);
  const InFlight::Overdue overdue =
      rank.in_flight.Poll(later + kPatience + std::chrono::seconds(1), kPatience);
  CHECK_EQ(overdue.found, true);
  CHECK_EQ(overdue.sequence, 1u);
  CHECK_EQ(overdue.operation, rank.site->operation());
}

TEST(whoever_polls_does_not_wait_for_who_records) {
  Rank rank;
  const int count = rank.in_flight.capacity();
  rank.Give(1, 2);
  rank.own.done[1] = 3;  // the second has begun, and hangs
  rank.in_flight.Refresh();
  InFlight::Overdue overdue;
  meanwhile = [&] {
    rank.in_flight.Poll(rank.clock, kPatience);
    overdue = rank.in_flight.Poll(rank.clock + 2 * kPatience, kPatience);
  };
  for (const int more : {1, count}) {  // with a place of their own and without
    overdue = {};
    rank.Give(1, more);
    CHECK_EQ(overdue.found, true);
    CHECK_EQ(overdue.sequence, 2u);
    CHECK_EQ(rank.Completed(), 1);
  }
  // All are done when the end of the last entry is put off again: it stays.
  meanwhile = [&] {
    rank.own.done[1] = rank.own.recorded[1];
    rank.in_flight.Refresh();
    CHECK_EQ(rank.in_flight.size(), 1);
  };
  rank.Give(1);
  meanwhile = nullptr;
  CHECK_EQ(rank.in_flight.size(), 1);
  // And where they fail meanwhile, it fails too.
  rank.own.done[1] = 0;
  rank.Give(1, count);
  meanwhile = [&] { rank.in_flight.Fail(); };
  rank.Give(1);
  meanwhile = nullptr;
  CHECK_EQ(rank.in_flight.size(), 0);
  for (const auto& entry : rank.recorder.Snapshot()) {
    CHECK_TRUE(entry.state != State::kStarted);
  }
}

TEST(those_right_behind_one_another_take_one_event_each) {
  Rank rank;
  rank.Give(1);
  rank.Give(1, 3, std::chrono::microseconds(1));
  CHECK_EQ(rank.own.recorded[1], 2 + 3);
  rank.Give(2, 1, std::chrono::microseconds(1));  // of another stream
  CHECK_EQ(rank.own.recorded[2], 2);
  rank.own.done[1] = 3;  // the first two
  CHECK_EQ(rank.Refreshed(), 2);
  // The third runs from then on.
  CHECK_EQ(rank.in_flight.Poll(rank.clock, kPatience).found, false);
  const auto overdue = rank.in_flight.Poll(rank.clock + 2 * kPatience, kPatience);
  CHECK_EQ(overdue.found, true);
  CHECK_EQ(overdue.sequence, 3u);
  rank.own.done[1] = 5;
  rank.own.done[2] = 2;
  CHECK_EQ(rank.Refreshed(), 5);
}

}  // namespace
}  // namespace jaxcomm::testing
