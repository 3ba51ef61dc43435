// The shared memory of processes: whose memory a process attaches to, and how processes
// get and return places in the table of crossings, and channels.
#include "ffi/backends/host/arena/arena.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <deque>

#include "ffi/core/hash.h"
#include "ffi/os/segment.h"
#include "tests/ffi/processes.h"

namespace jaxcomm::testing {
namespace {

constexpr int64_t kBytes = 4096;
constexpr uint64_t kNonce = 0x1234567890abcdef;

std::string Attach(const std::string& path) {
  return TextOf(Segment::Attach({path, kBytes, kNonce}).status());
}

// Makes a file look like the segment that is announced; gone afterwards.
struct File {
  explicit File(std::string path) : path(std::move(path)) {
    const int fd = open(this->path.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    CHECK_TRUE(fd >= 0);
    CHECK_EQ(ftruncate(fd, kBytes), 0);
    CHECK_EQ(pwrite(fd, &kNonce, sizeof(kNonce), 0), 8);
    close(fd);
  }
  ~File() { unlink(path.c_str()); }
  const std::string path;
};

std::string Named(const std::string& name) {
  return StrCat("/dev/shm/jaxcomm-test-", getpid(), name);
}

TEST(both_kinds_of_segments_are_attached_to) {
  for (const bool named : {false, true}) {
    const auto made = Must(Segment::Create(kBytes, named));
    made->data()[100] = 'x';
    CHECK_EQ(Must(Segment::Attach(made->address()))->data()[100], 'x');
    SegmentAddress longer = made->address(), other = made->address();
    longer.bytes *= 2;
    ++other.nonce;
    for (const auto& wrong : {longer, other}) {
      CHECK_FAILS(Segment::Attach(wrong).status(), "not the segment");
    }
  }
}

TEST(a_forked_child_leaves_the_name_to_its_parent) {
  auto made = Must(Segment::Create(kBytes, /*named=*/true));
  CHECK_EQ(Child([&] { made = nullptr; }).Wait(), EXIT_SUCCESS);
  CHECK_OK(Segment::Attach(made->address()).status());
}

TEST(other_paths_are_refused) {
  const File elsewhere(StrCat("/tmp/jaxcomm-segment-test-", getpid()));
  const std::string above = "/dev/shm/jaxcomm-/../../.." + elsewhere.path;
  for (const std::string& path :
       {elsewhere.path, above, std::string(), std::string("/dev/shm/jaxcomm-"),
        std::string("/proc/self/fd/1"), std::string("/proc//fd/1"),
        std::string("/proc/1/fd/"), std::string("/proc/1/fd/1/"),
        std::string("/proc/1x/fd/1"), std::string("/dev/tty")}) {
    CHECK_CONTAINS(Attach(path), "no path of shared memory");
  }
}

TEST(links_and_files_of_other_kinds_are_refused) {
  const File file(Named("file"));
  CHECK_EQ(Attach(file.path), "");
  const std::string link = Named("link"), fifo = Named("fifo");
  CHECK_EQ(symlink(file.path.c_str(), link.c_str()), 0);
  CHECK_TRUE(!Attach(link).empty());
  CHECK_EQ(mkfifo(fifo.c_str(), 0600), 0);
  CHECK_CONTAINS(Attach(fifo), "not the segment");
  unlink(link.c_str());
  unlink(fifo.c_str());
  if (geteuid() != 0) return;  // only root gives files away
  if (chown(file.path.c_str(), 1, 1) != 0) {
    CHECK_EQ(errno, EINVAL);  // a sandbox without other users
    return;
  }
  CHECK_CONTAINS(Attach(file.path), "belongs to user 1");
}

TEST(nobody_can_change_the_size_of_anonymous_memory) {
  const auto segment = Must(Segment::Create(kBytes, false));
  const int fd = open(segment->address().path.c_str(), O_RDWR);
  for (const int64_t bytes : {int64_t{0}, 2 * kBytes}) {
    CHECK_EQ(ftruncate(fd, bytes), -1);
    CHECK_EQ(errno, EPERM);
  }
  close(fd);
  // And memory whose size can be changed is not attached to.
  const int loose = memfd_create("loose", MFD_CLOEXEC);
  CHECK_EQ(ftruncate(loose, kBytes), 0);
  CHECK_EQ(pwrite(loose, &kNonce, sizeof(kNonce), 0), 8);
  CHECK_CONTAINS(Attach(StrCat("/proc/", getpid(), "/fd/", loose)), "size may change");
  close(loose);
}

TEST(processes_agree_on_signatures_whatever_their_standard_library) {
  // Published test vectors of FNV-1a.
  CHECK_EQ(Fnv1a(""), 0xcbf29ce484222325u);
  CHECK_EQ(Fnv1a("foobar"), 0x85944171f73967e8u);
  CHECK_EQ(FloatSite("permute", {-1, 0}, 4)->signature(),
           Fnv1a("permute/sum/-1,0,float32[4]->float32[4]"));
}

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
    const std::vector<int> names = {0, 1, 2, 3};
    for (int process : {0, 1}) {
      arenas.push_back(std::make_unique<OpenArena>(segment, names, process));
    }
    for (int process : {2, 3}) {
      communicators.push_back(MakeLocalCommunicator(
          SpecOf(segment, Unwatched(4), process, {{102, 103}}, {{2, 3}})));
    }
  }
  // Processes 0 and 1 take a place in the table; with `channel`, a channel as well.
  // False if there was none.
  bool Take(bool channel) {
    const CrossingKey key{7, 0, 1, ++last_tag};
    std::vector<Crossing*> found;
    for (const auto& arena : arenas) {
      found.push_back(arena->Join({key, 0b11, 1, 1, "held"}, channel));
      if (found.back() == nullptr) return false;
    }
    CHECK_TRUE(found[0] == found[1]);
    held.push_back(found[0]);
    return true;
  }
  // All places, or all channels.
  bool TakeAll(bool channels) {
    const size_t all = channels ? kChannels : kCrossings;
    for (int i = 0; i < 100000 && held.size() < all; ++i) {
      if (!Take(channels) && channels) return false;
      if (channels && held.back()->channel.load() < 0) return false;
    }
    return held.size() == all;
  }
  void GiveBack(size_t left = 0) {
    while (held.size() > left) {
      for (const auto& arena : arenas) arena->Leave(held.front());
      held.pop_front();
    }
  }
  // Whether processes 0 and 1 find all there is.
  bool NothingIsLost() {
    bool is_whole = TakeAll(/*channels=*/true);
    GiveBack();
    is_whole = TakeAll(/*channels=*/false) && is_whole;
    GiveBack();
    return is_whole;
  }
  uint32_t rings() const {
    return arenas[0]->process(2).doorbell.rings() +
           arenas[0]->process(3).doorbell.rings();
  }

  const std::shared_ptr<Segment> segment = MakeSegment(4);
  std::vector<std::unique_ptr<OpenArena>> arenas;
  std::vector<std::shared_ptr<Communicator>> communicators;
  std::deque<Crossing*> held;
  uint64_t last_tag = 0;
};

// Whether processes that wait for a channel, or for a place, are rung when all but
// `left` are returned. One that does not sleep yet looks by itself, and after 30 s it
// looks anyway.
bool AreRung(bool channels, size_t left) {
  for (int trial = 0; trial < 20; ++trial) {
    TwoGroups groups;
    CHECK_TRUE(groups.TakeAll(channels));
    Site site("all_reduce", {}, kLarge, 2);
    std::deque<RankBuffers> buffers = {{kLarge, kLarge, 1}, {kLarge, kLarge, 2}};
    std::deque<Outcome> outcomes(2);
    for (int i : {0, 1}) {
      buffers[i].Arrive(*groups.communicators[i], site.of[i].get(), 1, 102 + i,
                        &outcomes[i]);
    }
    const auto& starved = groups.arenas[0]->header().starved;
    CHECK_TRUE(Until([&] { return (starved.load() & 0b1100) == 0b1100; }));
    for (int i = 0; i < 10; ++i) LetOthersRun();
    for (Outcome& outcome : outcomes) CHECK_TRUE(!outcome.done());
    const uint32_t before = groups.rings();
    groups.GiveBack(left);
    const bool rung = groups.rings() > before;
    for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
    for (RankBuffers& rank : buffers) CHECK_EQ(rank.result[kLarge - 1], 3.0f);
    if (rung) return true;
  }
  return false;
}

TEST(a_returned_channel_wakes_the_processes_that_wait_for_one) {
  CHECK_TRUE(AreRung(/*channels=*/true, kChannels - 1));
}

TEST(a_returned_place_in_the_table_wakes_the_processes_that_wait_for_one) {
  // All but a few, for a key fits into a part of the table only.
  CHECK_TRUE(AreRung(/*channels=*/false, 4));
}

TEST(what_a_killed_process_left_half_done_is_repaired) {
  TwoGroups groups;
  OpenArena& arena = *groups.arenas[0];
  CHECK_TRUE(groups.NothingIsLost());
  // The process may die between any two steps of assigning a channel or opening a
  // crossing, and between returning a channel and freeing its crossing.
  for (const bool returns : {false, true}) {
    CHECK_EQ(Child([&] {
               pthread_mutex_lock(&arena.header().mutex);
               if (!returns) arena.header().channels = 0xffff;
               for (int i = 0; i < kCrossings; ++i) {
                 arena.crossing(i)->members = 0b11;
                 arena.crossing(i)->here = returns ? 0b11 : 0;
                 if (returns) arena.crossing(i)->left = 0b11;
                 arena.crossing(i)->state = Crossing::kOpen;
               }
             }).Wait(),
             EXIT_SUCCESS);
    CHECK_TRUE(groups.NothingIsLost());
  }
}

TEST(a_process_that_dies_alone_in_a_call_is_named_to_those_who_come_later) {
  // Rank 0's process dies while it waits for rank 1's: played here by a process that is
  // reported as ended, whose holdings are released.
  Child child;
  const auto segment = MakeSegment(2);
  const std::vector<Peer> peers = {PeerOf(child.pid(), 0), PeerOf(getpid(), 1)};
  const auto communicator =
      MakeLocalCommunicator(SpecOf(segment, peers, 1, {{100, 101}}, {{0, 1}}));
  // A view of the same crossings; the destructor would say that the process has left.
  static auto& dead = *new OpenArena(segment, {0, 1}, 0);
  Crossing* const alone = dead.Join({{7, 0, 1, 1}, 0b11, 1, 1, "all_reduce"}, true);
  child.Kill();
  CHECK_TRUE(Until([&] { return alone->state.load() == Crossing::kFree; }));
  CHECK_TRUE(Until([&] { return dead.header().channels.load() == 0; }));
  Site site("all_reduce", {}, 4, 1);
  RankBuffers buffers(4, 4, 1);
  Outcome outcome;
  buffers.Arrive(*communicator, site.of[0].get(), 1, 101, &outcome);
  CHECK_CONTAINS(outcome.Wait(), "gone with process 0");
}

TEST(processes_that_lack_each_other_wait_for_good) {
  struct Seated {
    int process;
    uint64_t lacks;  // mask
  };
  struct Case {
    std::vector<std::vector<Seated>> crossings;
    uint64_t still, found;
  };
  const std::vector<Case> cases = {
      {{{{0, 0b10}}, {{1, 0b01}}}, 0b1111, 0b0011},
      // One computes, and will come.
      {{{{0, 0b10}}, {{1, 0b01}}}, 0b1101, 0},
      // Process 1 came to the second place, and lacks a process that waits nowhere.
      {{{{0, 0b10}}, {{1, 0b100}}}, 0b1111, 0},
      // A circle of three, in which one waits in two, and one that waits for it.
      {{{{0, 0b10}, {3, 0b10}}, {{1, 0b100}}, {{2, 0b01}}, {{2, 0b10}}},
       0b1111,
       0b1111},
      // Process 2 may go on by its second wait, and then all.
      {{{{0, 0b10}, {3, 0b10}}, {{1, 0b100}}, {{2, 0b01}}, {{2, 0}}}, 0b1111, 0},
      // Likewise by what is not one of those that stand still.
      {{{{0, 0b10}}, {{1, 0b01}}, {{1, 0b1000}}}, 0b0111, 0},
      // It came since process 0 said that it lacks it.
      {{{{0, 0b10}, {1, 0b100}}, {{2, 0b10}}}, 0b1111, 0b0110},
      // Two lack one that they need, and one that is busy.
      {{{{0, 0b110}}, {{1, 0b101}}}, 0b0011, 0b0011},
  };
  for (const Case& each : cases) {
    const auto segment = MakeSegment(4);
    std::deque<Arena> arenas;
    for (int process : {0, 1, 2, 3}) {
      arenas.emplace_back(segment, std::vector<int>{0, 1, 2, 3}, process);
    }
    uint64_t tag = 0;
    for (const auto& seats : each.crossings) {
      ++tag;
      for (const Seated& seated : seats) {
        Arena& arena = arenas[seated.process];
        Crossing* const joined = arena.Join({{7, 0, 1, tag}, 0b1111, 1, 1, "x"}, false);
        arena.seat(joined, seated.process).lacks = seated.lacks;
      }
    }
    CHECK_EQ(arenas[0].WaitForEachOther(each.still), each.found);
  }
}

TEST(numbers_that_a_wild_pointer_wrote_are_an_error) {
  TwoGroups groups;
  OpenArena& arena = *groups.arenas[0];
  // Processes 2 and 3 call a collective.
  Site site("all_reduce", {}, kLarge, 2);
  std::deque<RankBuffers> buffers = {{kLarge, kLarge, 1}, {kLarge, kLarge, 2}};
  std::deque<Outcome> outcomes(2);
  const auto arrive = [&](int i) {
    buffers[i].Arrive(*groups.communicators[i], site.of[i].get(), 1, 102 + i,
                      &outcomes[i]);
  };
  arrive(0);
  Crossing* open = nullptr;
  for (int i = 0; i < kCrossings; ++i) {
    if (arena.crossing(i)->state == Crossing::kOpen) open = arena.crossing(i);
  }
  open->channel = 100000;
  arrive(1);
  for (Outcome& outcome : outcomes) {
    CHECK_CONTAINS(outcome.Wait(), "was overwritten (a channel is 100000, of 16)");
  }
  // Whatever the numbers are. Nothing is begun where something has failed.
  TwoGroups others;
  CHECK_TRUE(others.Take(true));
  Crossing* const crossing = others.held.front();
  for (const int channel : {-2, kChannels, INT32_MAX, INT32_MIN}) {
    crossing->channel = channel;
    CHECK_FAILS(arena.ChannelOf(crossing).status(), "was overwritten");
  }
  for (const uint32_t code : {17u, 4711u, UINT32_MAX}) {
    crossing->error = code;
    CHECK_FAILS(arena.FailureOf(crossing), "was overwritten (an error code is");
  }
  crossing->members = ~uint64_t{0};
  CHECK_EQ(arena.MembersOf(crossing), 0b1111u);
}

TEST(a_seat_given_up_for_a_living_process_is_left_once) {
  TwoGroups groups;
  CHECK_TRUE(groups.Take(true));
  Crossing* const crossing = groups.held.front();
  groups.arenas[0]->Fail(crossing, FailedPrecondition("by the test"));
  groups.arenas[0]->Abandon(crossing, 1);
  groups.GiveBack();
  CHECK_EQ(crossing->left.load(), 0b11u);
  CHECK_EQ(crossing->here.load(), 0b11u);
}

}  // namespace
}  // namespace jaxcomm::testing
