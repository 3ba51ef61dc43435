#include "ffi/backends/host/arena/process_set.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <thread>
#include <utility>

#include "ffi/flight/flight_dump.h"
#include "ffi/os/cores.h"
#include "ffi/os/forked.h"
#include "ffi/os/mutex.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

// Where every process has a core, a handler steps its transfer for this long after it
// last moved.
constexpr auto kHandlerSpin = std::chrono::microseconds(100);
// With fewer cores than processes, the handler yields so many times instead.
constexpr int kHandlerYields = 8;
// The progress thread spins this long before it sleeps on the doorbell.
constexpr auto kProgressSpin = std::chrono::microseconds(50);
constexpr double kWarnSeconds = 30;
constexpr double kMostSleepSeconds = 60;
// While transfers move, how often it looks for others that cannot end.
constexpr auto kCheckPeriod = std::chrono::milliseconds(10);

std::vector<int> Names(const std::vector<Peer>& peers) {
  std::vector<int> names;
  for (const Peer& peer : peers) names.push_back(peer.process_index);
  return names;
}

}  // namespace

struct ProcessSet::State {
  State(std::shared_ptr<Segment> segment, std::vector<Peer> peers_of, int self,
        Grace grace)
      : peers(std::move(peers_of)),
        arena(std::move(segment), Names(peers), self),
        deadlock(&arena, std::move(grace)) {}

  void Progress();
  // The steps of Progress(), on its thread. Returns whether anything moved.
  bool StepAll();
  // Returns whether there was anything to take.
  bool TakeIncoming();
  // Gives an interrupted transfer kAfterInterrupt from now on.
  static void Hurry(PendingTransfer& pending, Clock::time_point now);
  // Fails transfers that cannot end. Returns whether it failed any, and for how long
  // the thread may sleep.
  bool CheckAll(Clock::time_point now, double* seconds);
  // Fails a transfer if a member is gone or its timeout has passed. True if it did.
  bool Check(PendingTransfer& pending, Clock::time_point now);
  // Before the thread sleeps: fails what waits for good. Returns whether there was any.
  bool EndDeadlock(Clock::time_point last_moved, Clock::time_point now,
                   double* seconds);
  uint64_t Gone() const;
  // Sleeps until somebody rings, and counts for whom transfers waited meanwhile.
  void Sleep(uint32_t seen, double seconds);

  const std::vector<Peer> peers;
  Arena arena;
  Deadlock deadlock;  // of Progress() alone
  bool has_waited = false;
  std::atomic<uint64_t> dead{0};  // mask of processes that have ended
  std::atomic<bool> stopping{false};
  // Written by Progress() alone.
  std::array<std::atomic<double>, kMaxProcesses> waited{};

  Mutex mutex;
  std::vector<PendingTransfer> incoming GUARDED_BY(mutex);
  std::vector<std::pair<uint64_t, Status>> aborts GUARDED_BY(mutex);  // by owner
  bool is_interrupted GUARDED_BY(mutex) = false;
  std::atomic<bool> has_incoming{false};
  std::vector<PendingTransfer> active;  // of Progress() alone

  std::thread progress;  // started under the lock, joined by the destructor
  std::unique_ptr<PeerWatch> watch;
};

ProcessSet::ProcessSet(std::shared_ptr<Segment> segment, std::vector<Peer> peers,
                       int self, Grace grace)
    : state_(std::make_shared<State>(std::move(segment), std::move(peers), self,
                                     std::move(grace))) {
  {
    MutexLock lock(state_->mutex);
    (void)StartProgress(state_);  // if refused, Continue() tries again
  }
  std::vector<Peer> others = state_->peers;
  others[self] = Peer{};
  state_->watch = std::make_unique<PeerWatch>(
      std::move(others), [weak = std::weak_ptr<State>(state_)](size_t place) {
        const auto state = weak.lock();
        if (state == nullptr) return;
        const uint64_t bit = uint64_t{1} << place;
        state->dead.fetch_or(bit, std::memory_order_release);
        state->arena.ReleaseHoldings(bit);
        state->arena.RingSelf();
      });
}

// The thread shares the state: it may be the one that destroys the set.
Status ProcessSet::StartProgress(const std::shared_ptr<State>& state) {
  if (state->progress.joinable()) return OkStatus();
  ASSIGN_OR_RETURN(state->progress,
                   StartThread([state] { state->Progress(); }, "jaxcomm-arena"));
  return OkStatus();
}

ProcessSet::~ProcessSet() {
  if (IsForked()) return;
  state_->stopping.store(true, std::memory_order_release);
  state_->arena.RingSelf();
  state_->watch.reset();
  if (state_->progress.get_id() == std::this_thread::get_id()) {
    state_->progress.detach();
  } else if (state_->progress.joinable()) {
    state_->progress.join();
  }
}

Arena& ProcessSet::arena() const { return state_->arena; }
const std::vector<Peer>& ProcessSet::peers() const { return state_->peers; }
std::vector<std::pair<int, double>> ProcessSet::waited() const {
  std::vector<std::pair<int, double>> waited;
  for (size_t i = 0; i < state_->peers.size(); ++i) {
    if (static_cast<int>(i) == state_->arena.self()) continue;
    waited.emplace_back(state_->peers[i].process_index,
                        state_->waited[i].load(std::memory_order_relaxed));
  }
  return waited;
}

uint64_t ProcessSet::gone() const { return state_->Gone(); }

bool ProcessSet::RunBriefly(Transfer* transfer) const {
  const bool cores_for_all = static_cast<int>(state_->peers.size()) <= Cores();
  Clock::time_point end = Clock::now() + kHandlerSpin;
  int yields = 0;
  for (int i = 1;; ++i) {
    switch (transfer->Step()) {
      case Transfer::Outcome::kDone:
        return true;
      case Transfer::Outcome::kMoved:
        end = Clock::now() + kHandlerSpin;
        yields = 0;
        break;
      case Transfer::Outcome::kIdle:
        if (!cores_for_all) {
          if (++yields > kHandlerYields) return false;
          std::this_thread::yield();
          break;
        }
        Pause();
        if (i % 16 != 0) break;
        if (Clock::now() >= end) return false;
        // The core may be wanted by another rank of this process.
        if (i % 256 == 0) std::this_thread::yield();
        break;
    }
  }
}

void ProcessSet::Continue(PendingTransfer pending) {
  Status status;
  {
    MutexLock lock(state_->mutex);
    status = StartProgress(state_);
    if (status.success()) {
      ++WaitsOfProcess();
      state_->incoming.push_back(std::move(pending));
      state_->has_incoming.store(true, std::memory_order_release);
    }
  }
  if (status.failure()) {
    pending.transfer->Fail(status);
    pending.done();
    return;
  }
  state_->arena.RingSelf();
}

void ProcessSet::Abort(uint64_t owner, const Status& reason) {
  {
    MutexLock lock(state_->mutex);
    state_->aborts.emplace_back(owner, reason);
    state_->has_incoming.store(true, std::memory_order_release);
  }
  state_->arena.RingSelf();
}

void ProcessSet::Interrupt() {
  {
    MutexLock lock(state_->mutex);
    state_->is_interrupted = true;
    state_->has_incoming.store(true, std::memory_order_release);
  }
  state_->arena.RingSelf();
}

uint64_t ProcessSet::State::Gone() const {
  uint64_t gone = dead.load(std::memory_order_acquire);
  for (int i = 0; i < static_cast<int>(peers.size()); ++i) {
    if (arena.process(i).presence.load(std::memory_order_acquire) ==
        ProcessState::kLeft) {
      gone |= uint64_t{1} << i;
    }
  }
  return gone;
}

bool ProcessSet::State::Check(PendingTransfer& pending, Clock::time_point now) {
  Transfer& transfer = *pending.transfer;
  const uint64_t gone = Gone();
  if (const uint64_t needed = transfer.Needs(gone); needed != 0) {
    // Tell the peers first: a dump may take a second.
    transfer.Fail(
        Status(ErrorCode::kAborted, pending.describe(needed, Hindrance::kEnded)));
    transfer.Abandon(gone);
    DumpFlightRecords("peer gone");
    return true;
  }
  const double waited = std::chrono::duration<double>(now - pending.begin).count();
  if (waited > pending.timeout_seconds) {
    std::string text = pending.describe(transfer.absent(), Hindrance::kLate);
    if (pending.is_interrupted) text = StrCat("interrupted: ", text);
    transfer.Fail(Status(
        pending.is_interrupted ? ErrorCode::kCancelled : ErrorCode::kDeadlineExceeded,
        std::move(text)));
    DumpFlightRecords("timeout");
    return true;
  }
  return false;
}

void ProcessSet::State::Hurry(PendingTransfer& pending, Clock::time_point now) {
  const std::chrono::duration<double> end = now - pending.begin + kAfterInterrupt;
  if (end.count() >= pending.timeout_seconds) return;
  pending.timeout_seconds = end.count();
  pending.is_interrupted = true;
}

bool ProcessSet::State::StepAll() {
  bool moved = false;
  for (size_t i = 0; i < active.size();) {
    const Transfer::Outcome outcome = active[i].transfer->Step();
    moved |= outcome != Transfer::Outcome::kIdle;
    if (outcome != Transfer::Outcome::kDone) {
      ++i;
      continue;
    }
    // Off the list before done(), which may start another one.
    PendingTransfer over = std::move(active[i]);
    active.erase(active.begin() + static_cast<int64_t>(i));
    --WaitsOfProcess();
    over.done();
  }
  return moved;
}

bool ProcessSet::State::TakeIncoming() {
  if (!has_incoming.load(std::memory_order_acquire)) return false;
  if (!std::exchange(has_waited, true)) deadlock.Begin();
  MutexLock lock(mutex);
  has_incoming.store(false, std::memory_order_relaxed);
  for (PendingTransfer& transfer : incoming) active.push_back(std::move(transfer));
  incoming.clear();
  for (const auto& [owner, reason] : aborts) {
    for (PendingTransfer& mine : active) {
      if (mine.owner == owner) mine.transfer->Fail(reason);
    }
  }
  aborts.clear();
  if (is_interrupted) {
    for (PendingTransfer& mine : active) Hurry(mine, Clock::now());
    is_interrupted = false;
  }
  return true;
}

bool ProcessSet::State::CheckAll(Clock::time_point now, double* seconds) {
  bool failed = false;
  *seconds = kMostSleepSeconds;
  for (PendingTransfer& mine : active) {
    failed |= Check(mine, now);
    const double waited = std::chrono::duration<double>(now - mine.begin).count();
    *seconds = std::min(*seconds, mine.timeout_seconds - waited + 0.001);
    if (mine.warns && waited > kWarnSeconds) {
      mine.warns = false;
      std::fprintf(stderr, "jaxcomm: still waiting: %s\n",
                   mine.describe(mine.transfer->absent(), Hindrance::kLate).c_str());
    }
    if (mine.warns) *seconds = std::min(*seconds, kWarnSeconds - waited + 0.001);
  }
  *seconds = std::max(*seconds, 0.0);
  return failed;
}

bool ProcessSet::State::EndDeadlock(Clock::time_point last_moved, Clock::time_point now,
                                    double* seconds) {
  std::vector<const Transfer*> waiting;
  for (const PendingTransfer& mine : active) waiting.push_back(mine.transfer);
  const uint64_t stuck = deadlock.Find(waiting, Gone(), last_moved, now);
  if (!active.empty()) *seconds = std::min(*seconds, deadlock.seconds());
  for (PendingTransfer& mine : active) {
    const uint64_t missing = mine.transfer->absent() & stuck;
    if (missing == 0) continue;
    // The others that wait are refused, with this text.
    mine.transfer->Fail(Status(ErrorCode::kFailedPrecondition,
                               mine.describe(missing, Hindrance::kDeadlock)));
    DumpFlightRecords("deadlock");
    return true;
  }
  return false;
}

void ProcessSet::State::Sleep(uint32_t seen, double seconds) {
  uint64_t absent = 0;
  for (const PendingTransfer& mine : active) absent |= mine.transfer->absent();
  const Clock::time_point begin = Clock::now();
  arena.process(arena.self()).doorbell.Sleep(seen, seconds);
  const double slept = std::chrono::duration<double>(Clock::now() - begin).count();
  for (; absent != 0; absent &= absent - 1) {
    std::atomic<double>& of_process = waited[__builtin_ctzll(absent)];
    of_process.store(of_process.load(std::memory_order_relaxed) + slept,
                     std::memory_order_relaxed);
  }
}

void ProcessSet::State::Progress() {
  Clock::time_point last_moved = Clock::now(), last_checked = last_moved;
  double seconds = 0;
  Doorbell& doorbell = arena.process(arena.self()).doorbell;
  const bool cores_for_all = static_cast<int>(peers.size()) <= Cores();
  for (int turn = 0; !stopping.load(std::memory_order_acquire); ++turn) {
    const uint32_t seen = doorbell.rings();
    if (TakeIncoming()) last_moved = Clock::now();
    if (StepAll()) {
      last_moved = Clock::now();
      if (last_moved - last_checked < kCheckPeriod) continue;
      last_checked = last_moved;
      CheckAll(last_checked, &seconds);
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (!active.empty() && cores_for_all && now - last_moved < kProgressSpin) {
      Pause();
      if (turn % 64 == 0) std::this_thread::yield();
      continue;
    }
    // Peers ring no idle process: its handlers look for work themselves.
    doorbell.FallAsleep(/*is_idle=*/active.empty());
    // Step again after announcing that we sleep: a peer that published before it saw
    // the announcement does not ring.
    const bool moved = StepAll();
    const bool failed = CheckAll(now, &seconds);
    if (!moved && !failed && !has_incoming.load(std::memory_order_acquire) &&
        !stopping.load(std::memory_order_acquire) &&
        !EndDeadlock(last_moved, now, &seconds)) {
      Sleep(seen, seconds);
    }
    deadlock.GoOn();
    doorbell.WakeUp();
  }
}

}  // namespace jaxcomm
