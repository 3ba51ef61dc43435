// Groups that span processes, with the processes played by communicators of their own
// over one segment: each sees the others through shared memory only.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "ffi/backends/host/arena.h"
#include "ffi/backends/host/local.h"
#include "ffi/backends/host/process_set.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

// Rank r, device 100 + r, lives in process process_of[r].
struct Processes {
  explicit Processes(std::vector<int> process_of, double timeout_seconds = 60,
                     std::vector<Peer> peers = {})
      : process_of(std::move(process_of)) {
    count = *std::max_element(this->process_of.begin(), this->process_of.end()) + 1;
    CHECK_TRUE(Segment::Create(Arena::Bytes(count), false, &segment).success());
    Arena::Format(*segment, count);
    if (peers.empty()) {
      for (int process = 0; process < count; ++process) {
        peers.push_back({0, 0, process});  // of pid 0: not watched
      }
    }
    for (int process = 0; process < count; ++process) {
      Start(process, timeout_seconds, peers);
    }
  }

  // Process 0 has the shorter patience.
  void Start(int process, double timeout_seconds, const std::vector<Peer>& peers) {
    std::vector<int64_t> devices;
    for (size_t r = 0; r < process_of.size(); ++r) devices.push_back(100 + r);
    CommunicatorSpec spec = Spec({devices}, timeout_seconds * (1 + process));
    spec.process_set = std::make_shared<ProcessSet>(segment, peers, process);
    spec.processes = {process_of};
    communicators.push_back(MakeLocalCommunicator(std::move(spec)));
  }

  Communicator& of(int rank) { return *communicators[process_of[rank]]; }
  int size() const { return static_cast<int>(process_of.size()); }

  std::vector<int> process_of;
  int count = 0;
  std::shared_ptr<Segment> segment;
  std::vector<std::shared_ptr<Communicator>> communicators;
};

// Call sites of one place in the program: one for each process, as in life.
struct Site {
  Site(const std::string& collective, std::vector<int64_t> params,
       std::vector<Leaf> operands, std::vector<Leaf> results, int processes) {
    for (int i = 0; i < processes; ++i) {
      of.push_back(MakeSite(collective, params, operands, results));
    }
  }
  std::vector<std::unique_ptr<CallSite>> of;
};

std::vector<int> Blocks(int processes, int ranks_each) {
  std::vector<int> process_of;
  for (int p = 0; p < processes; ++p)
    process_of.insert(process_of.end(), ranks_each, p);
  return process_of;
}

struct Case {
  std::string collective;
  std::vector<int64_t> params;
  int64_t operand, result;  // elements
};

// `n` elements a rank, times the number of ranks where a collective cuts.
std::vector<Case> Cases(int size, int64_t n) {
  std::vector<int64_t> ring(size), none(size, -1);
  for (int r = 0; r < size; ++r) ring[r] = (r + size - 1) % size;
  none[size - 1] = 0;
  return {
      {"all_reduce", {}, n, n},     {"permute", ring, n, n},
      {"permute", none, n, n},      {"scan", {0, 0}, n, n},
      {"scan", {1, 0}, n, n},       {"scan", {0, 1}, n, n},
      {"reduce", {size - 1}, n, n}, {"broadcast", {size - 1}, n, n},
      {"barrier", {}, n, n},
  };
}

float Value(int rank, int64_t i) {
  return static_cast<float>((rank + 1) * (i % 97 + 1));
}

std::vector<std::vector<float>> Run(Processes& processes, const Case& the, int rounds) {
  const int size = processes.size();
  Site site(the.collective, the.params, {FloatLeaf(the.operand)},
            {FloatLeaf(the.result)}, processes.count);
  std::vector<std::vector<float>> results(size);
  std::atomic<int> errors{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      RankBuffers buffers(the.operand, the.result, 0);
      for (int64_t i = 0; i < the.operand; ++i) buffers.operand[i] = Value(r, i);
      for (int round = 0; round < rounds; ++round) {
        std::fill(buffers.result.begin(), buffers.result.end(), -1.0f);
        Outcome outcome;
        buffers.Arrive(processes.of(r), site.of[processes.process_of[r]].get(), round,
                       100 + r, nullptr, &outcome);
        if (const std::string error = outcome.Wait(); !error.empty()) {
          std::fprintf(stderr, "%s\n", error.c_str());
          ++errors;
        }
      }
      results[r] = buffers.result;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(errors.load(), 0);
  return results;
}

TEST(every_layout_gives_what_one_process_gives) {
  const std::vector<std::vector<int>> layouts = {
      Blocks(2, 1), Blocks(3, 1), Blocks(2, 2), Blocks(4, 2), {0, 1, 0, 1}, {1, 0, 0}};
  for (const std::vector<int>& layout : layouts) {
    Processes several(layout);
    Processes one(std::vector<int>(layout.size(), 0));
    for (int64_t n : {0, 1, 7, 1000, 1025, 9000, 40000, 700001}) {
      for (const Case& the : Cases(static_cast<int>(layout.size()), n)) {
        const int before = Failures();
        const auto found = Run(several, the, 2), expected = Run(one, the, 1);
        CHECK_TRUE(found == expected);
        if (Failures() != before) {
          std::fprintf(stderr, "  in %s of %ld elements on %zu ranks of %d processes\n",
                       the.collective.c_str(), static_cast<long>(n), layout.size(),
                       several.count);
        }
      }
    }
  }
}

TEST(independent_calls_meet_in_any_order) {
  // More than there are channels, large and small, in another order on each process.
  constexpr int kCalls = 40;
  Processes processes(Blocks(3, 1));
  std::vector<std::unique_ptr<Site>> sites;
  for (int i = 0; i < kCalls; ++i) {
    const int64_t n = i % 2 ? 100 : 60000 + i;
    sites.push_back(std::make_unique<Site>("all_reduce", std::vector<int64_t>{},
                                           std::vector<Leaf>{FloatLeaf(n)},
                                           std::vector<Leaf>{FloatLeaf(n)}, 3));
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      std::vector<int> order(kCalls);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), std::mt19937(r));
      std::deque<Outcome> outcomes(kCalls);
      std::deque<RankBuffers> buffers;
      for (int i = 0; i < kCalls; ++i) {
        const int64_t n = sites[i]->of[r]->operands()[0].elements;
        buffers.emplace_back(n, n, static_cast<float>((r + 1) * (i + 1)));
      }
      for (int i : order) {
        buffers[i].Arrive(processes.of(r), sites[i]->of[r].get(), 5, 100 + r, nullptr,
                          &outcomes[i], /*tag=*/1000 + i);
      }
      for (int i = 0; i < kCalls; ++i) {
        if (!outcomes[i].Wait().empty()) ++wrong;
        for (float x : buffers[i].result)
          wrong += x != 6.0f * static_cast<float>(i + 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(a_process_that_is_ahead_meets_the_others_in_order) {
  // Rank 0 receives nothing and so waits for nobody: it opens many crossings of one
  // key, of which some are over before the next one opens.
  constexpr int kRounds = 300;
  Processes processes(Blocks(2, 1));
  for (int64_t n : {1, 20000}) {
    Site site("permute", {-1, 0}, {FloatLeaf(n)}, {FloatLeaf(n)}, 2);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        for (int round = 0; round < kRounds; ++round) {
          RankBuffers buffers(n, n, static_cast<float>(round));
          Outcome outcome;
          buffers.Arrive(processes.of(r), site.of[r].get(), 1, 100 + r, nullptr,
                         &outcome);
          if (!outcome.Wait().empty()) ++wrong;
          wrong += buffers.result[n - 1] != static_cast<float>(r == 1 ? round : 0);
          if (r == 1 && round % 7 == 0) std::this_thread::yield();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
  }
}

struct Pair {
  explicit Pair(int64_t n) : a(n, n, 1), b(n, n, 2) {}
  RankBuffers a, b;
  Outcome outcome_a, outcome_b;
};

TEST(another_signature_is_an_error_on_both_with_both_signatures) {
  Processes processes(Blocks(2, 1));
  Site four("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 1);
  Site eight("all_reduce", {}, {FloatLeaf(8)}, {FloatLeaf(8)}, 1);
  Pair pair(8);
  pair.a.Arrive(processes.of(0), four.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
  pair.b.Arrive(processes.of(1), eight.of[0].get(), 1, 101, nullptr, &pair.outcome_b);
  for (Outcome* outcome : {&pair.outcome_a, &pair.outcome_b}) {
    const std::string text = outcome->Wait();
    CHECK_CONTAINS(text, "all_reduce(float32[4])");
    CHECK_CONTAINS(text, "all_reduce(float32[8])");
  }
  // The next run is not touched.
  Site good("all_reduce", {}, {FloatLeaf(8)}, {FloatLeaf(8)}, 2);
  Pair next(8);
  next.a.Arrive(processes.of(0), good.of[0].get(), 2, 100, nullptr, &next.outcome_a);
  next.b.Arrive(processes.of(1), good.of[1].get(), 2, 101, nullptr, &next.outcome_b);
  CHECK_EQ(next.outcome_a.Wait(), "");
  CHECK_EQ(next.outcome_b.Wait(), "");
  CHECK_EQ(next.a.result[7], 3.0f);
}

// Calls of one place each, by rank.
struct Calls {
  Calls(Processes& processes, const std::string& collective,
        std::vector<int64_t> params, int64_t elements, int run, uint64_t tag = 1)
      : processes(processes),
        site(collective, params, {FloatLeaf(elements)}, {FloatLeaf(elements)},
             processes.count),
        run(run),
        tag(tag) {
    for (int r = 0; r < processes.size(); ++r)
      buffers.emplace_back(elements, elements, r);
    outcomes.resize(processes.size());
  }
  void Begin(int rank) {
    const int process = processes.process_of[rank];
    buffers[rank].Arrive(processes.of(rank), site.of[process].get(), run, 100 + rank,
                         nullptr, &outcomes[rank], tag);
  }
  void BeginAll() {
    for (int rank = 0; rank < processes.size(); ++rank) Begin(rank);
  }
  std::string End(int rank) { return outcomes[rank].Wait(); }

  Processes& processes;
  Site site;
  int run;
  uint64_t tag;
  std::deque<RankBuffers> buffers;
  std::deque<Outcome> outcomes;
};

constexpr char kHadEnded[] = "failed in others: a rank of process 1 called";

TEST(processes_that_had_gone_on_hear_of_a_mismatch_in_what_comes_next) {
  // Processes 0 and 2 are done with it; process 1 calls something else.
  Processes processes(Blocks(3, 1));
  Calls send(processes, "permute", {-1, 0, -1}, 4, 1);
  Calls sum(processes, "all_reduce", {}, 4, 1);
  for (int rank : {0, 2}) send.Begin(rank);
  for (int rank : {0, 2}) CHECK_EQ(send.End(rank), "");
  sum.Begin(1);
  CHECK_CONTAINS(sum.End(1), "permute(float32[4])");
  Calls next(processes, "all_reduce", {}, 8, 2);
  next.BeginAll();
  for (int rank : {0, 1, 2}) {
    const std::string text = next.End(rank);
    CHECK_CONTAINS(text, "all_reduce(float32[8])");
    CHECK_CONTAINS(text, kHadEnded);
    CHECK_CONTAINS(text, "permute(float32[4])");
  }
  // All have heard: what comes then is not touched.
  Calls then(processes, "all_reduce", {}, 8, 3);
  then.BeginAll();
  for (int rank : {0, 1, 2}) CHECK_EQ(then.End(rank), "");
}

TEST(processes_that_wait_in_what_comes_next_hear_of_a_mismatch_at_once) {
  Processes processes(Blocks(3, 1));
  Calls send(processes, "permute", {-1, 0, -1}, 4, 1);
  Calls sum(processes, "all_reduce", {}, 4, 1);
  Calls next(processes, "all_reduce", {}, 8, 1, /*tag=*/2);
  send.Begin(0);
  CHECK_EQ(send.End(0), "");
  next.Begin(0);
  next.Begin(1);
  // Their threads sleep by then; the one that finds out is among them.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const auto begin = std::chrono::steady_clock::now();
  sum.Begin(1);
  CHECK_CONTAINS(sum.End(1), "permute(float32[4])");
  for (int rank : {0, 1}) CHECK_CONTAINS(next.End(rank), kHadEnded);
  // They would look up by themselves after 30 s.
  CHECK_TRUE(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
}

TEST(a_mismatch_in_one_group_is_nothing_to_another) {
  // Process 0 has a rank in two groups; process 1 calls something else in the first.
  std::shared_ptr<Segment> segment;
  CHECK_TRUE(Segment::Create(Arena::Bytes(3), false, &segment).success());
  Arena::Format(*segment, 3);
  const std::vector<Peer> peers = {{0, 0, 0}, {0, 0, 1}, {0, 0, 2}};
  std::vector<std::shared_ptr<Communicator>> of;
  for (int process = 0; process < 3; ++process) {
    CommunicatorSpec spec = Spec({{100, 101}, {102, 103}}, 60);
    spec.process_set = std::make_shared<ProcessSet>(segment, peers, process);
    spec.processes = {{0, 1}, {0, 2}};
    of.push_back(MakeLocalCommunicator(std::move(spec)));
  }
  Site send("permute", {-1, 0}, {FloatLeaf(4)}, {FloatLeaf(4)}, 3);
  Site sum("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 3);
  Site next("all_reduce", {}, {FloatLeaf(8)}, {FloatLeaf(8)}, 3);
  const auto call = [&](Site& site, int process, int device, int run,
                        RankBuffers* buffers, Outcome* outcome) {
    buffers->Arrive(*of[process], site.of[process].get(), run, device, nullptr,
                    outcome);
  };
  Pair first(4), mine(8), others(8);
  call(send, 0, 100, 1, &first.a, &first.outcome_a);
  CHECK_EQ(first.outcome_a.Wait(), "");
  call(sum, 1, 101, 1, &first.b, &first.outcome_b);
  CHECK_CONTAINS(first.outcome_b.Wait(), "permute(float32[4])");
  call(next, 0, 102, 2, &others.a, &others.outcome_a);
  call(next, 2, 103, 2, &others.b, &others.outcome_b);
  CHECK_EQ(others.outcome_a.Wait(), "");
  CHECK_EQ(others.outcome_b.Wait(), "");
  call(next, 0, 100, 2, &mine.a, &mine.outcome_a);
  call(next, 1, 101, 2, &mine.b, &mine.outcome_b);
  CHECK_CONTAINS(mine.outcome_a.Wait(), kHadEnded);
  CHECK_CONTAINS(mine.outcome_b.Wait(), kHadEnded);
}

TEST(a_process_that_never_comes_is_named_at_the_deadline) {
  Processes processes(Blocks(3, 1), /*timeout_seconds=*/0.3);
  Site site("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 3);
  Site other("barrier", {}, {}, {}, 1);
  Pair pair(4);
  pair.a.Arrive(processes.of(0), site.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
  pair.b.Arrive(processes.of(1), other.of[0].get(), 1, 101, nullptr, &pair.outcome_b,
                /*tag=*/2);
  const std::string text = pair.outcome_a.Wait();
  CHECK_CONTAINS(text, "all_reduce(float32[4]) over axes ('x',)");
  CHECK_CONTAINS(text, "waited 0.3 s for ranks 1, 2");
  CHECK_CONTAINS(text, "waits in barrier() over axes ('x',) instead");
  CHECK_CONTAINS(text, "has called nothing yet");
  CHECK_CONTAINS(pair.outcome_b.Wait(), "barrier()");
  // Who comes too late is told at once.
  Outcome late;
  RankBuffers buffers(4, 4, 1);
  buffers.Arrive(processes.of(2), site.of[2].get(), 1, 102, nullptr, &late);
  const std::string told = late.Wait();
  CHECK_CONTAINS(told, "rank 2 of 3");
  CHECK_CONTAINS(told, "came when the others had stopped waiting");
  CHECK_CONTAINS(told, "waited 0.3 s for ranks 1, 2");
}

TEST(a_process_that_leaves_is_an_error_on_those_who_wait) {
  for (int64_t n : {4, 100000}) {
    Processes processes(Blocks(2, 1));
    Site site("all_reduce", {}, {FloatLeaf(n)}, {FloatLeaf(n)}, 2);
    Pair pair(n);
    pair.a.Arrive(processes.of(0), site.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
    processes.communicators[1].reset();
    const std::string text = pair.outcome_a.Wait();
    CHECK_CONTAINS(text, "waited for rank 1, gone with");
    CHECK_CONTAINS(text, "called finalize or exited");
  }
}

TEST(a_process_that_is_killed_is_noticed_at_once) {
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  std::vector<Peer> peers = {PeerOf(getpid(), 0), PeerOf(child, 1)};
  Processes processes(Blocks(2, 1), 60, peers);
  Site site("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 2);
  Pair pair(4);
  pair.a.Arrive(processes.of(0), site.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // asleep by now
  CHECK_TRUE(!pair.outcome_a.done());
  const auto killed = std::chrono::steady_clock::now();
  kill(child, SIGKILL);
  const std::string text = pair.outcome_a.Wait();
  const auto noticed = std::chrono::steady_clock::now();
  CHECK_CONTAINS(text, "died");
  CHECK_CONTAINS(text, std::to_string(child));
  // The deadline is 60 s away; what counts is that nobody waits for it.
  CHECK_TRUE(noticed - killed < std::chrono::seconds(10));
  waitpid(child, nullptr, 0);
}

TEST(closing_a_communicator_ends_its_crossings) {
  Processes processes(Blocks(2, 1));
  Site site("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 2);
  Pair pair(4);
  pair.a.Arrive(processes.of(0), site.of[0].get(), 1, 100, nullptr, &pair.outcome_a);
  processes.of(0).Abort(FailedPrecondition("closed by the test"));
  CHECK_CONTAINS(pair.outcome_a.Wait(), "closed by the test");
}

TEST(an_arena_costs_what_was_touched) {
  Processes processes(Blocks(2, 1));
  CHECK_TRUE(processes.segment->resident_bytes() < (1 << 20));
  Run(processes, {"all_reduce", {}, 1 << 20, 1 << 20}, 3);
  const int64_t after = processes.segment->resident_bytes();
  // Two channels of two processes, if one starts a round before the other is done.
  constexpr int64_t kAtMost = 2 * 2 * kSlots * kSlotBytes + (1 << 20);
  CHECK_TRUE(after < kAtMost);
  Run(processes, {"all_reduce", {}, 4 << 20, 4 << 20}, 3);
  CHECK_TRUE(processes.segment->resident_bytes() < kAtMost);
}

}  // namespace
}  // namespace jaxcomm::testing
