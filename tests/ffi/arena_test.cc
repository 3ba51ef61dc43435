// The table of crossings and the channels: how processes get and return them.
#include "ffi/backends/host/arena.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/ffi/check.h"
#include "tests/ffi/processes.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

constexpr int64_t kLarge = 20000;  // elements: more than fits into a crossing

// Shows what is not for the library's other files.
struct OpenArena : Arena {
  using Arena::Arena;
  using ArenaMemory::crossing;
  using ArenaMemory::header;
};

// Four processes of one segment. A communicator joins processes 2 and 3; the test plays
// processes 0 and 1 itself, and so holds what it wants for as long as it wants.
struct TwoGroups {
  TwoGroups() {
    segment = Must(Segment::Create(Arena::Bytes(4), false));
    Arena::Format(*segment);
    const std::vector<int> names = {0, 1, 2, 3};
    for (int process : {0, 1}) {
      arenas.push_back(std::make_unique<OpenArena>(segment, names, process));
    }
    for (int process : {2, 3}) {
      CommunicatorSpec spec = Spec({{102, 103}}, 60);
      const std::vector<Peer> peers = {{0, 0, 0}, {0, 0, 1}, {0, 0, 2}, {0, 0, 3}};
      spec.process_set = std::make_shared<ProcessSet>(segment, peers, process);
      spec.processes = {{2, 3}};
      communicators.push_back(MakeLocalCommunicator(std::move(spec)));
    }
  }
  // Processes 0 and 1 take a place in the table; with `channel`, a channel as well.
  // False if there was none.
  bool Take(uint64_t tag, bool channel) {
    const CrossingKey key{7, 0, 1, tag};
    std::vector<Crossing*> found;
    for (const auto& arena : arenas) {
      Crossing* const joined = arena->Join({key, 0b11, 1, 1, "held"}, channel);
      if (joined == nullptr) return false;
      found.push_back(joined);
    }
    CHECK_TRUE(found[0] == found[1]);
    held.push_back(found[0]);
    return true;
  }
  // Whether processes 0 and 1 find all there is.
  bool NothingIsLost() {
    uint64_t tag = 1000000;
    for (int i = 0; i < kChannels; ++i) {
      if (!Take(tag++, true) || held.back()->channel.load() < 0) return false;
    }
    for (int i = 0; i < 100000 && held.size() < kCrossings; ++i) Take(tag++, false);
    const bool has_all = held.size() == kCrossings;
    while (!held.empty()) GiveBack();
    return has_all;
  }
  void GiveBack() {
    for (const auto& arena : arenas) arena->Leave(held.front());
    held.pop_front();
  }
  void Begin() {
    for (int i : {0, 1}) {
      buffers[i].Arrive(*communicators[i], site.of[i].get(), 1, 102 + i, nullptr,
                        &outcomes[i]);
    }
  }
  // Looks as long as a woken process may take on a busy machine, and well below the
  // 30 s after which a process looks by itself.
  bool EndsSoon() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < end) {
      if (outcomes[0].done() && outcomes[1].done()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

  std::shared_ptr<Segment> segment;
  std::vector<std::unique_ptr<OpenArena>> arenas;
  std::vector<std::shared_ptr<Communicator>> communicators;
  std::deque<Crossing*> held;
  Site site{"all_reduce", {}, {FloatLeaf(kLarge)}, {FloatLeaf(kLarge)}, 2};
  std::deque<RankBuffers> buffers = {{kLarge, kLarge, 1}, {kLarge, kLarge, 2}};
  std::deque<Outcome> outcomes = std::deque<Outcome>(2);
};

// Long enough for the progress threads to fall asleep.
void LetThemSleep() { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }

TEST(a_returned_channel_wakes_the_processes_that_wait_for_one) {
  TwoGroups groups;
  for (int i = 0; i < kChannels; ++i) CHECK_TRUE(groups.Take(i, true));
  groups.Begin();
  LetThemSleep();
  for (Outcome& outcome : groups.outcomes) CHECK_TRUE(!outcome.done());
  groups.GiveBack();
  CHECK_TRUE(groups.EndsSoon());
  for (Outcome& outcome : groups.outcomes) CHECK_EQ(outcome.Wait(), "");
  for (RankBuffers& rank : groups.buffers) CHECK_EQ(rank.result[kLarge - 1], 3.0f);
}

TEST(a_returned_place_in_the_table_wakes_the_processes_that_wait_for_one) {
  TwoGroups groups;
  uint64_t tag = 0;
  while (groups.held.size() < kCrossings && tag < 100000) groups.Take(tag++, false);
  CHECK_EQ(groups.held.size(), static_cast<size_t>(kCrossings));
  groups.Begin();
  LetThemSleep();
  for (Outcome& outcome : groups.outcomes) CHECK_TRUE(!outcome.done());
  // All but a few, for a key fits into a part of the table only.
  while (groups.held.size() > 4) groups.GiveBack();
  CHECK_TRUE(groups.EndsSoon());
  for (Outcome& outcome : groups.outcomes) CHECK_EQ(outcome.Wait(), "");
}

// Runs `body` in a child that then dies, or is killed after so long.
template <typename Body>
void DieIn(const Body& body, int microseconds = 0) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  if (microseconds > 0) {
    usleep(microseconds);
    kill(child, SIGKILL);
  }
  CHECK_EQ(waitpid(child, nullptr, 0), child);
}

TEST(what_a_killed_process_left_half_done_is_repaired) {
  TwoGroups groups;
  OpenArena& arena = *groups.arenas[0];
  CHECK_TRUE(groups.NothingIsLost());
  DieIn([&] {
    pthread_mutex_lock(&arena.header().mutex);
    // The process may die between any two steps of assigning a channel or opening a
    // crossing.
    arena.header().channels = 0xffff;
    for (int i = 0; i < kCrossings; ++i) {
      arena.crossing(i)->members = 0b11;
      arena.crossing(i)->here = 0;
      arena.crossing(i)->state = Crossing::kOpen;
    }
  });
  CHECK_TRUE(groups.NothingIsLost());
  DieIn([&] {
    pthread_mutex_lock(&arena.header().mutex);
    // The process may die between returning a channel and freeing its crossing.
    for (int i = 0; i < kCrossings; ++i) {
      arena.crossing(i)->members = 0b11;
      arena.crossing(i)->here = 0b11;
      arena.crossing(i)->left = 0b11;
      arena.crossing(i)->state = Crossing::kOpen;
    }
  });
  CHECK_TRUE(groups.NothingIsLost());
}

TEST(processes_killed_at_any_time_lose_nothing) {
  TwoGroups groups;
  std::mt19937 random(3);
  for (int trial = 0; trial < 100; ++trial) {
    Arena& ended = *groups.arenas[0];
    DieIn(
        [&] {
          for (uint64_t tag = 0;; ++tag) {
            Crossing* const alone = ended.Join({{7, 0, 1, tag}, 0b1, 1, 1, ""}, true);
            Crossing* const shared = ended.Join({{7, 0, 2, tag}, 0b11, 1, 1, ""}, true);
            if (shared != nullptr) {
              ended.Fail(shared, FailedPrecondition("by the test"));
              ended.Leave(shared);
            }
            if (alone != nullptr) ended.Leave(alone);
          }
        },
        /*microseconds=*/1 + static_cast<int>(random() % 5000));
    groups.arenas[1]->ReleaseHoldings(0b1);
    const bool is_whole = groups.NothingIsLost();
    CHECK_TRUE(is_whole);
    if (!is_whole) return;
  }
}

TEST(a_process_that_dies_alone_in_a_call_is_named_to_those_who_come_later) {
  // Rank 0's process dies while it waits for rank 1's: played here by a process that is
  // reported as ended, whose holdings are released.
  const pid_t child = fork();
  if (child == 0) {
    while (true) pause();
  }
  const auto segment = Must(Segment::Create(Arena::Bytes(2), false));
  Arena::Format(*segment);
  CommunicatorSpec spec = Spec({{100, 101}}, 60);
  const std::vector<Peer> peers = {PeerOf(child, 0), PeerOf(getpid(), 1)};
  spec.process_set = std::make_shared<ProcessSet>(segment, peers, 1);
  spec.processes = {{0, 1}};
  const auto communicator = MakeLocalCommunicator(spec);
  // A view of the same crossings; the destructor would say that the process has left.
  static auto& dead = *new OpenArena(segment, {0, 1}, 0);
  Crossing* const alone = dead.Join({{7, 0, 1, 1}, 0b11, 1, 1, "all_reduce"}, true);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK_TRUE(Comes([&] { return alone->state.load() == Crossing::kFree; }));
  CHECK_TRUE(Comes([&] { return dead.header().channels.load() == 0; }));
  Site site("all_reduce", {}, {FloatLeaf(4)}, {FloatLeaf(4)}, 1);
  RankBuffers buffers(4, 4, 1);
  Outcome outcome;
  buffers.Arrive(*communicator, site.of[0].get(), 1, 101, nullptr, &outcome);
  CHECK_CONTAINS(outcome.Wait(), "gone with process 0");
}

TEST(a_seat_given_up_for_a_living_process_is_left_once) {
  TwoGroups groups;
  CHECK_TRUE(groups.Take(1, true));
  Crossing* const crossing = groups.held.front();
  groups.arenas[0]->Fail(crossing, FailedPrecondition("by the test"));
  groups.arenas[0]->Abandon(crossing, 1);
  groups.GiveBack();
  CHECK_EQ(crossing->left.load(), 0b11u);
  CHECK_EQ(crossing->here.load(), 0b11u);
  CHECK_TRUE(groups.NothingIsLost());
}

TEST(a_lock_that_fails_fails_the_calls) {
  TwoGroups groups;
  pthread_mutex_t* const mutex = &groups.arenas[0]->header().mutex;
  DieIn([&] { pthread_mutex_lock(mutex); });
  CHECK_EQ(pthread_mutex_lock(mutex), EOWNERDEAD);
  pthread_mutex_unlock(mutex);  // not repaired: from now on nobody gets it
  for (int run : {1, 2}) {
    Outcome outcome;
    groups.buffers[0].Arrive(*groups.communicators[0], groups.site.of[0].get(), run,
                             102, nullptr, &outcome);
    CHECK_CONTAINS(outcome.Wait(), "the lock of the shared memory has failed");
  }
}

}  // namespace
}  // namespace jaxcomm::testing
