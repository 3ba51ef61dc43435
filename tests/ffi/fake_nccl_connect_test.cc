// Tests what ends the waits of a communicator that is being made, before its timeout.
#include <cmath>
#include <functional>
#include <thread>

#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

// What does not come to its end: a call that does not return, or what it started.
struct Stuck {
  const char* function;
  bool returns;
};
constexpr Stuck kFirstUse[] = {
    {"ncclSend", false}, {"ncclAllReduce", false}, {"ncclAllReduce", true}};

void Plan(const Stuck& stuck) {
  TheFake().clear_trace();
  stuck.returns ? TheFake().hang(stuck.function, 0)
                : TheFake().connect(stuck.function, 0);
}

// Calls body(), and meanwhile() on another thread once it is stuck.
template <typename Body>
Status While(const Stuck& stuck, const std::function<void()>& meanwhile,
             const Body& body) {
  Plan(stuck);
  std::thread other([&] {
    CHECK_TRUE(Until([&] { return Count(stuck.function) > 0; }));
    LetOthersRun();
    meanwhile();
  });
  const Status status = body();
  other.join();
  return status;
}

// Two devices of this process, of which the second counts as that of another one.
struct WithPeer {
  ErrorOr<std::shared_ptr<NcclWorld>> MakeWorld() {
    const nccl::UniqueId id = NewId();
    return NcclWorld::Create(Library(), 2, {{100, 0, 0}, {101, 1, 1}},
                             {id.internal, sizeof(id.internal)}, {}, patience,
                             {PeerOf(peer.pid(), 1)});
  }
  Status Make(std::shared_ptr<NcclWorld> world) {
    const auto made = MakeWith(std::move(world));
    return made.has_error() ? made.error() : OkStatus();
  }
  ErrorOr<std::shared_ptr<Communicator>> MakeWith(std::shared_ptr<NcclWorld> world) {
    CommunicatorSpec spec = Spec({{100, 101}}, kHangSeconds);
    spec.platform = "gpu";
    spec.processes = {{0, 1}};
    if (ways.one_shot) setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
    const NcclSpec how{std::move(world), {}, patience, ways, OnFailure::kPoison};
    return MakeNcclCommunicator(std::move(spec), how);
  }

  Child peer;
  NcclPatience patience{kHangSeconds};
  EnginePolicy ways;
};

TEST(a_process_that_ends_while_ranks_connect_is_noticed_at_once) {
  for (const Stuck& stuck : kFirstUse) {
    WithPeer with;
    const auto world = Must(with.MakeWorld());
    const Status status =
        While(stuck, [&] { with.peer.Kill(); }, [&] { return with.Make(world); });
    CHECK_FAILS(status, "process 1 (rank 1) has ended");
  }
}

enum class By { kNccl, kSplitPhase, kOneShot, kCopies };

// What rank 0 is told, at its first use of it, and then, once process 1 has ended.
void EndAtFirstUse(const Use& use, By by) {
  WithPeer with;
  with.ways.one_shot = by == By::kOneShot;
  with.ways.copy_engines = by == By::kCopies;
  const auto communicator = Must(with.MakeWith(Must(with.MakeWorld())));
  const auto site = use.MakeSite();
  Part part(0, site.get());
  std::fill(part.operand.begin(), part.operand.end(), 0.0f);
  const bool hosts_wait = site->operands().size() > 1;
  const auto kill = [&] {
    const bool begins = Until([&] { return !IsIdle(*communicator); });
    LetOthersRun();
    const bool waits = begins && !IsIdle(*communicator);
    if (!waits) CHECK_EQ(std::string(use.collective), "waits for the other rank");
    with.peer.Kill();
  };
  std::thread other;
  if (hosts_wait) other = std::thread(kill);
  Status status =
      by == By::kSplitPhase ? part.Start(*communicator) : part.Enqueue(*communicator);
  if (by == By::kSplitPhase && status.success()) status = part.Done(*communicator);
  hosts_wait ? other.join() : kill();
  CHECK_EQ(part.on.Synchronize(), cuda::kSuccess);
  hosts_wait ? CHECK_FAILS(status, "has ended") : CHECK_OK(status);
  CHECK_TRUE(hosts_wait || std::isnan(part.result[0]));
  CHECK_FAILS(part.Enqueue(*communicator), "has ended");
}

TEST_ALONE(a_process_that_ends_at_the_first_use_of_any_operation_is_named,
           EXIT_SUCCESS) {
  for (const Use& use : UsesOfTwo(1)) {
    if (use.collective == std::string("scan")) continue;  // NCCL has none
    EndAtFirstUse(use, By::kNccl);
    if (use.MakeSite()->operands().size() == 1) EndAtFirstUse(use, By::kSplitPhase);
  }
  EndAtFirstUse({"all_reduce", {}, 4, 4}, By::kOneShot);
  // A sum and a hop that are staged.
  constexpr int64_t kStaged = kMostLineBytesOfSum / 4 + 4;
  EndAtFirstUse({"all_reduce", {}, kStaged, kStaged}, By::kOneShot);
  EndAtFirstUse({"permute", {1, 0}, kStaged, kStaged}, By::kOneShot);
  EndAtFirstUse({"permute", {1, 0}, kMany, kMany}, By::kCopies);
}

// The watchdog may hold the last reference, and freeing memory waits for the device.
TEST(a_communicator_that_ends_on_the_watchdog_holds_up_no_poll) {
  struct Last final : Watched {
    bool Poll() override {
      communicator = nullptr;
      return ++polls < 2;
    }
    std::shared_ptr<Communicator> communicator;
    std::atomic<int> polls{0};
  };
  WithPeer with;
  const auto busy = Must(with.MakeWith(Must(with.MakeWorld())));
  const auto last = std::make_shared<Last>();
  last->communicator = Must(with.MakeWith(Must(with.MakeWorld())));
  const auto site = Use{"all_reduce", {}, 4, 4}.MakeSite();
  Part part(0, site.get());
  CHECK_OK(part.Enqueue(*busy));  // process 1 does not come
  CHECK_OK(Watch(last));
  WakeWatchdog();
  CHECK_TRUE(Until([&] { return last->polls == 2; }));
  with.peer.Kill();
  CHECK_EQ(part.on.Synchronize(), cuda::kSuccess);
}

TEST(a_process_that_ends_while_all_split_is_noticed_at_once) {
  WithPeer with;
  const auto world = Must(with.MakeWorld());
  const Status status = While(
      {"ncclCommSplit", true}, [&] { with.peer.Kill(); },
      [&] { return with.Make(world); });
  CHECK_FAILS(status, "ncclCommSplit is not done, and process 1 has ended");
  CHECK_TRUE(world->is_broken());
}

TEST(a_process_that_ends_while_all_join_is_noticed_at_once) {
  WithPeer with;
  const Status status = While(
      {"ncclCommInitRankConfig", true}, [&] { with.peer.Kill(); },
      [&] {
        const auto world = with.MakeWorld();
        return world.has_error() ? world.error() : OkStatus();
      });
  CHECK_FAILS(status, "ncclCommInitRankConfig is not done, and process 1 has ended");
}

TEST(an_interrupt_ends_the_wait_for_ranks_that_connect) {
  WithPeer with;
  Event pressed;
  with.patience.interrupted = [&] { return pressed.is_set(); };
  const auto world = Must(with.MakeWorld());
  // What does not return keeps the only thread that Python tells.
  const Status status = While(
      {"ncclAllReduce", true}, [&] { pressed.Set(); },
      [&] { return with.Make(world); });
  CHECK_FAILS(status, "interrupted");
}

// As the store or the launcher tells, of any host.
TEST(a_failure_elsewhere_ends_the_wait_for_ranks_that_connect) {
  for (const Stuck& stuck : kFirstUse) {
    WithPeer with;
    const auto world = Must(with.MakeWorld());
    const Status status = While(
        stuck, [] { ProcessFailure::Get().FailAllElsewhere("process 7 failed first"); },
        [&] { return with.Make(world); });
    CHECK_FAILS(status, "process 7 failed first");
  }
}

}  // namespace
}  // namespace jaxcomm::testing
