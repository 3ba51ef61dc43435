#include "ffi/backends/nccl/failure/health.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <utility>

#include "ffi/backends/nccl/engines/engine.h"
#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/queue/local_rank.h"
#include "ffi/core/last_resort.h"
#include "ffi/flight/flight_dump.h"
#include "ffi/os/mutex.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

// For NCCL's kernels to leave after an abort, and for the watch to look at one
// communicator once it knows that a process has ended.
constexpr double kAbortSeconds = 10;
constexpr double kLookSeconds = 5;
// How long Close() waits for operations in flight.
constexpr double kCloseSeconds = 10;
// For other processes to poison what they run: their threads look ten times a second.
constexpr std::chrono::seconds kSettle{10};
// How long it waits for a thread that is about to give a stream an operation. It may be
// slow to run, or wait in NCCL for another rank.
constexpr double kGiveSeconds = 1;

constexpr char kStopped[] =
    ". No result of it is handed out: the GPUs of this process were stopped, and every "
    "use of them raises from now on. End this process and start it anew";
constexpr char kPoisoned[] =
    ". Every bit of its results is set, which is NaN for floats. Call "
    "jaxcomm.finalize(), then jaxcomm.init()";
constexpr char kIdle[] =
    ". Nothing was on its way. Call jaxcomm.finalize() in every process, then "
    "jaxcomm.init()";

// `how`: nothing if no device was at an operation.
const char* MeaningOf(std::optional<OnFailure> how) {
  if (!how.has_value()) return kIdle;
  if (how == OnFailure::kPoison) return kPoisoned;
  return how == OnFailure::kRaise ? kStopped : "";
}

using Clock = std::chrono::steady_clock;

// Threads that abort operations.
std::atomic<int> aborts{0};

// The healths of this process.
class Live {
 public:
  // Never destroyed: the watch may look when the process ends.
  static Live& Get() {
    static Live* const live = new Live;
    return *live;
  }

  void Add(const Health* health, std::weak_ptr<Health> kept) {
    MutexLock lock(mutex_);
    of_[health] = std::move(kept);
  }
  void Remove(const Health* health) {
    MutexLock lock(mutex_);
    of_.erase(health);
  }

  // Those that are not being destroyed.
  std::vector<std::shared_ptr<Health>> all() {
    std::vector<std::shared_ptr<Health>> all;
    MutexLock lock(mutex_);
    for (const auto& [health, kept] : of_) {
      if (auto each = kept.lock()) all.push_back(std::move(each));
    }
    return all;
  }
  // Without keeping any, so that none is released on this thread.
  template <typename Is>
  bool Any(const Is& is) {
    MutexLock lock(mutex_);
    return std::any_of(of_.begin(), of_.end(),
                       [&](const auto& each) { return is(*each.first); });
  }

 private:
  Mutex mutex_;
  std::map<const Health*, std::weak_ptr<Health>> of_ GUARDED_BY(mutex_);
};

}  // namespace

Health::Health(const CommunicatorSpec& spec, Policy policy, const LocalRanks& ranks)
    : spec_(spec),
      policy_(std::move(policy)),
      ranks_(ranks),
      detector_(spec, *policy_.world, ranks, engines_) {}

Health::~Health() {
  if (is_watched_) --num_watched_;
  Live::Get().Remove(this);
}

void Health::SetOwner(const std::shared_ptr<void>& owner) {
  owner_ = owner;
  Live::Get().Add(this, std::shared_ptr<Health>(owner, this));
}

Status Health::BeWatched() {
  const auto owner = owner_.lock();
  is_watched_ = true;
  ++num_watched_;
  return Watch(std::shared_ptr<Watched>(owner, this));
}

Status Health::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

Status Health::Broken() const {
  if (failed()) return failure();
  return DevicesAreStopped() ? DevicesStoppedError() : OkStatus();
}

Status Health::Refusal() const {
  if (Status broken = Broken(); broken.failure()) return broken;
  if (state() != State::kSuspended) return OkStatus();
  return FailedPrecondition(
      "the communicator is suspended; call its resume() in every process first");
}

void Health::SetSuspended(bool is_suspended) {
  MutexLock lock(mutex_);
  if (!failed()) state_ = is_suspended ? State::kSuspended : State::kLive;
}

NcclPatience Health::WhileWell(NcclPatience patience) const {
  patience.refusal = [this] { return Broken(); };
  patience.lost_peers = [this]() -> std::string {
    // What others are at may do without the process, and would be stopped.
    return policy_.world->any_gone() && !IsAnyBusy() ? detector_.LostPeers() : "";
  };
  return patience;
}

bool Health::is_busy() const { return AreBusy(ranks_); }

bool Health::WaitForAborts(double seconds) {
  return Wait({seconds}, "", [] { return aborts.load() == 0; }).success();
}

bool Health::IsAnyBusy() {
  return Live::Get().Any([](const Health& each) { return each.is_busy(); });
}

bool Health::RefuseAllOf(const WorldHealth& world, const Status& reason) {
  bool is_busy = false;
  for (const auto& each : Live::Get().all()) {
    if (each->policy_.world.get() != &world) continue;
    each->SetFailed(reason, /*names_a_call=*/false);
    is_busy = is_busy || each->is_busy();
  }
  return is_busy;
}

std::optional<OnFailure> Health::Strictest(const All& all) {
  std::optional<OnFailure> found;
  for (const auto& each : all) {
    if (each->is_busy()) {
      found = std::max(found.value_or(OnFailure::kPoison), each->policy_.on_failure);
    }
  }
  return found;
}

std::optional<OnFailure> Health::StrictestSoon(const All& all) {
  std::optional<OnFailure> found;
  (void)Wait({FailureDetector::kDrainAfterPeerExit.count() * 1e-3}, "", [&] {
    for (const auto& each : all) Refresh(each->ranks_);
    found = Strictest(all);
    return !found.has_value();
  });
  return found;
}

double Health::poll_seconds() const {
  return policy_.world->any_gone() ? kLookSeconds
                                   : spec_.timeout_seconds + kAbortSeconds;
}

bool Health::Poll() {
  if (!polling_.try_lock()) return !failed();  // another thread polls it
  const bool again = PollLocked();
  polling_.unlock();
  return again;
}

bool Health::PollLocked() {
  if (!failed() && DevicesAreStopped()) {
    SetFailed(DevicesStoppedError(), /*names_a_call=*/false);
    for (const auto& rank : ranks_) rank->queue.Fail();
    RefuseInEngines();
    AbortElsewhere(Ends::kThreadsInNccl);
  }
  if (failed()) return false;
  const FailureDetector::Finding found = detector_.Look();
  switch (found.what) {
    case FailureDetector::Finding::What::kNothing:
      return HaveWork(ranks_);
    case FailureDetector::Finding::What::kLookAgainSoon:
      return true;
    case FailureDetector::Finding::What::kFailure:
      Fail(found.reason, found.names_a_call, found.dump);
      return false;
  }
  return false;
}

bool Health::Refuse(State state, const Status& reason, bool names_a_call) {
  MutexLock lock(mutex_);
  if (failed()) return false;
  failure_ = reason;
  failure_names_call_ = names_a_call;
  state_.store(state, std::memory_order_release);
  return true;
}

bool Health::SetFailed(const Status& reason, bool names_a_call) {
  // Before any abort, here or elsewhere; also where another thread is about to.
  if (poison_ != nullptr) poison_->Set();
  if (!Refuse(State::kFailed, reason, names_a_call)) return false;
  if (poison_ == nullptr) return true;
  // NCCL's abort ends the operations of all that share resources, but not our kernels.
  for (Engine* engine : engines_) engine->Stop();
  return true;
}

void Health::Fail(const Status& reason, bool names_a_call, const char* dump,
                  bool is_closing) {
  if (failed()) return;
  All all = Live::Get().all();
  const auto allowed = [is_closing](std::optional<OnFailure> how) {
    return is_closing && how == OnFailure::kExit ? OnFailure::kRaise : how;
  };
  std::optional<OnFailure> how = allowed(StrictestSoon(all));
  const char* const meaning = MeaningOf(how);
  const Status failure(*reason.errc(), StrCat(reason.message(), meaning));
  if (!SetFailed(failure, names_a_call)) return;
  const Status together(*reason.errc(),
                        StrCat(reason.message(),
                               ". All communicators of NCCL in this process fail "
                               "together",
                               meaning));
  All failing;
  for (const auto& each : all) {
    if (each.get() != this && !each->SetFailed(together, /*names_a_call=*/false)) {
      continue;
    }
    each->policy_.world->SetBroken();
    failing.push_back(each);
  }
  // Not before all are poisoned: it tells other processes that they may abort.
  RecordFirstFailure(std::string(reason.message()));
  // A stream may have been given an operation since.
  how = std::max(how, allowed(Strictest(all)));
  if (how.has_value()) {
    std::string text;
    for (const auto& each : all) {
      if (!names_a_call && text.empty()) {
        text = FirstOperation(each->ranks_, each->spec_);
      }
    }
    text += failure.message();
    if (how == OnFailure::kExit) EndProcess(text);
    if (how == OnFailure::kRaise) {
      StopDevices(text, WorthWaitingFor(reason),
                  std::chrono::duration<double>(spec_.timeout_seconds));
    }
  }
  for (const auto& each : failing) {
    each->AbortElsewhere(how == OnFailure::kPoison ? Ends::kPoisoned
                                                   : Ends::kThreadsInNccl);
  }
  if (how.has_value()) {
    if (dump != nullptr) DumpFlightRecords(dump);
    for (const auto& each : failing) {
      for (const auto& rank : each->ranks_) rank->queue.Fail();
    }
  }
  for (const auto& each : failing) each->RefuseInEngines();
  WakeWatchdog();
  // The last reference, and with it a slow destructor, must not be released on the
  // watch's thread. Where no thread can be had, it is.
  failing.clear();
  (void)StartDetached([released = std::move(all)] {});
}

void Health::RefuseInEngines() {
  for (Engine* engine : engines_) engine->Refuse(failure());
}

bool Health::is_of_one_process() const {
  return std::all_of(
      spec_.processes.begin(), spec_.processes.end(), [](const auto& of_group) {
        return std::all_of(of_group.begin(), of_group.end(),
                           [&](int process) { return process == of_group[0]; });
      });
}

std::set<int64_t> Health::WorthWaitingFor(const Status& reason) const {
  if (reason.errc() != ErrorCode::kDeadlineExceeded) return {};
  // Else what waits for the late one may leave with what is no result.
  if (!is_of_one_process() || poison_ != nullptr) return {};
  return Late(ranks_);
}

void Health::FailAllElsewhere(const std::string& reason) {
  for (const auto& each : Live::Get().all()) each->FailElsewhere(reason);
}

void Health::FailElsewhere(const std::string& reason) {
  if (is_of_one_process() || DevicesAreStopped()) return;
  // The other may abort once this returns.
  if (failed() && poison_ != nullptr) poison_->Set();
  if (failed()) return;
  Fail(Status(ErrorCode::kAborted, StrCat(NameOf(spec_), ": ", reason)),
       /*names_a_call=*/false);
}

Status Health::FailureOf(const Call& call, const RankFacts& rank) const {
  CameTooLate(rank.ordinal);
  MutexLock lock(mutex_);
  if (failure_.success() || failure_names_call_) return failure_;
  return Status(*failure_.errc(), StrCat(call.site->description(), ", ",
                                         rank.ToString(), ": ", failure_.message()));
}

Status Health::FailCall(const Call& call, const RankFacts& rank, const Status& status) {
  if (failed()) return FailureOf(call, rank);
  const Status of_rank(*status.errc(), StrCat(rank.ToString(), ": ", status.message()));
  if (status.errc() != ErrorCode::kFailedPrecondition) {
    std::string text(of_rank.message());
    const bool is_late = status.errc() == ErrorCode::kDeadlineExceeded;
    const std::string lost = is_late ? "" : detector_.LostPeersSoon();
    if (!lost.empty()) text += StrCat(". ", lost, " has ended");
    return FailBy(call, rank, Status(ErrorCode::kInternal, std::move(text)));
  }
  return FailedPrecondition(call.site->description(), " (lane '", spec_.lane,
                            "'): ", of_rank.message());
}

Status Health::FailBy(const Call& call, const RankFacts& rank, const Status& status) {
  if (failed()) return FailureOf(call, rank);
  if (DevicesAreStopped()) return DevicesStoppedError();
  Fail(Status(*status.errc(), StrCat(call.site->description(), " (lane '", spec_.lane,
                                     "'): ", status.message())));
  return FailureOf(call, rank);
}

void Health::Close(const Status& reason) {
  const auto is_idle = [this] { return !Poll() || !HaveWork(ranks_); };
  const auto streams_are_idle = [&] {
    return is_idle() || std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) {
             return rank->queue.size() == 0;
           });
  };
  const double most = spec_.timeout_seconds;
  if (Wait({std::min(kGiveSeconds, most)}, "", is_idle).failure()) {
    (void)Wait({std::min(kCloseSeconds, most)}, "", streams_are_idle);
  }
  if (!failed() && HaveWork(ranks_)) {
    Fail(reason, /*names_a_call=*/true, /*dump=*/nullptr, /*is_closing=*/true);
  } else {
    Refuse(State::kStopping, reason, /*names_a_call=*/true);
    RefuseInEngines();
  }
  // Unregister here, so that the last reference, and with it the slow destructor, is
  // released on this thread and not on the watch's.
  Unwatch(*this);
}

bool Health::IsInNccl(const LocalRank& rank) const {
  return in_nccl_.load() > 0 || rank.queue.giving.load() > 0;
}

void Health::AbortElsewhere(Ends what) {
  std::shared_ptr<void> owner = owner_.lock();
  if (owner == nullptr) return;  // it is being destroyed, which aborts
  for (const auto& rank : ranks_) {
    if (what == Ends::kThreadsInNccl && !IsInNccl(*rank)) continue;
    // The owner goes with the function, and may end there.
    aborts += 1;
    const Status started = StartDetached(
        [this, owner, what, each = rank.get()]() mutable {
          AbortRank(*each, what);
          owner.reset();
          aborts -= 1;
        },
        "jaxcomm-abort");
    if (started.success()) continue;
    EndProcess(StrCat("a collective failed, and no thread can be had to end it: ",
                      failure().message()));
  }
}

void Health::AbortRank(LocalRank& rank, Ends what) {
  if (what == Ends::kPoisoned && !policy_.world->WaitUntilSettled(kSettle)) {
    EndProcess(StrCat(failure().message(),
                      ". A process that takes part did not say within ",
                      kSettle.count(), " s that it knows. If NCCL were ",
                      "stopped here, that process could read wrong numbers"));
  }
  // An aborted operation would let a stream go on.
  WaitForDeviceStop();
  if (what == Ends::kThreadsInNccl && !IsInNccl(rank)) return;
  // NCCL ends what runs, and then waits for the graphs that refer to the communicator,
  // which XLA keeps for as long as their programs.
  std::optional<LastResort> end;
  if (!rank.queue.was_captured()) {
    end.emplace(kAbortSeconds, StrCat("NCCL did not end ", NameOf(spec_), " within ",
                                      kAbortSeconds, " s"));
  }
  // NCCL last, which was added first: its abort waits for the device.
  for (size_t i = engines_.size(); i-- > 0;) engines_[i]->Abort(rank);
}

}  // namespace jaxcomm
