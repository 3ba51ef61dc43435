// The table of crossings and the channels: how processes get and return them.
#include "ffi/backends/host/arena.h"

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/ffi/check.h"
#include "tests/ffi/processes.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

constexpr int64_t kLarge = 20000;  // elements: more than fits into a crossing

// Four processes of one segment. A communicator joins processes 2 and 3; the test plays
// processes 0 and 1 itself, and so holds what it wants for as long as it wants.
struct TwoGroups {
  TwoGroups() {
    CHECK_TRUE(Segment::Create(Arena::Bytes(4), false, &segment).success());
    Arena::Format(*segment, 4);
    const std::vector<int> names = {0, 1, 2, 3};
    for (int process : {0, 1}) {
      arenas.push_back(std::make_unique<Arena>(segment, names, process));
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
      Crossing* const joined = arena->Join(key, 0b11, 1, "held", 1, channel);
      if (joined == nullptr) return false;
      found.push_back(joined);
    }
    CHECK_TRUE(found[0] == found[1]);
    held.push_back(found[0]);
    return true;
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
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (std::chrono::steady_clock::now() < end) {
      if (outcomes[0].done() && outcomes[1].done()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

  std::shared_ptr<Segment> segment;
  std::vector<std::unique_ptr<Arena>> arenas;
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

}  // namespace
}  // namespace jaxcomm::testing
