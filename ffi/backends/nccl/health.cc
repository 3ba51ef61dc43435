#include "ffi/backends/nccl/health.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "ffi/backends/nccl/engines/engine.h"
#include "ffi/backends/nccl/local_rank.h"
#include "ffi/core/last_resort.h"
#include "ffi/flight/flight_dump.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

// For NCCL's kernels to leave after an abort, and for the watch to look at one
// communicator once it knows that a process has ended.
constexpr double kAbortSeconds = 10;
constexpr double kLookSeconds = 5;
// How long Close() waits for operations in flight.
constexpr double kCloseSeconds = 10;
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

const char* MeaningOf(bool is_idle, OnFailure how) {
  if (is_idle) return kIdle;
  if (how == OnFailure::kPoison) return kPoisoned;
  return how == OnFailure::kRaise ? kStopped : "";
}

using Clock = std::chrono::steady_clock;

}  // namespace

Health::Health(const CommunicatorSpec& spec, const NcclLibrary& library, Policy policy,
               const LocalRanks& ranks)
    : spec_(spec),
      library_(library),
      policy_(std::move(policy)),
      ranks_(ranks),
      detector_(spec, policy_.world.get(), policy_.shares, ranks, engines_) {}

Health::~Health() {
  if (is_watched_) --num_watched_;
}

Status Health::BeWatched() {
  const auto owner = owner_.lock();
  is_watched_ = true;
  ++num_watched_;
  if (policy_.shares) policy_.world->Add(std::shared_ptr<Health>(owner, this));
  return Watch(std::shared_ptr<Watched>(owner, this));
}

Status Health::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

Status Health::Refusal() const {
  if (failed()) return failure();
  if (DevicesAreStopped()) return DevicesStoppedError();
  if (state() != State::kSuspended) return OkStatus();
  return FailedPrecondition(
      "the communicator is suspended; call its resume() in every process first");
}

void Health::SetSuspended(bool is_suspended) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failed()) state_ = is_suspended ? State::kSuspended : State::kLive;
}

bool Health::is_busy() const { return AreBusy(ranks_); }

std::string Health::first_operation() const { return FirstOperation(ranks_, spec_); }

std::string Health::FirstOperationOfAny() const {
  std::string text = first_operation();
  if (!policy_.shares) return text;
  for (const auto& sharer : policy_.world->sharers()) {
    if (text.empty()) text = sharer->first_operation();
  }
  return text;
}

bool Health::AnyBusy() const {
  if (is_busy()) return true;
  if (!policy_.shares) return false;
  const auto sharers = policy_.world->sharers();
  return std::any_of(sharers.begin(), sharers.end(),
                     [](const auto& sharer) { return sharer->is_busy(); });
}

bool Health::IsIdleSoon() {
  const auto end = Clock::now() + FailureDetector::kDrainAfterPeerExit;
  while (true) {
    Refresh(ranks_);
    if (!AnyBusy()) return true;
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

double Health::poll_seconds() const {
  return policy_.world->any_gone() ? kLookSeconds
                                   : spec_.timeout_seconds + kAbortSeconds;
}

bool Health::Poll() {
  std::unique_lock<std::mutex> lock(polling_, std::try_to_lock);
  if (!lock) return !failed();  // another thread polls it
  if (failed()) return false;
  if (DevicesAreStopped()) {
    SetFailed(DevicesStoppedError(), /*names_a_call=*/false);
    for (Engine* engine : engines_) engine->Refuse(failure());
    for (const auto& rank : ranks_) rank->queue.Fail();
    Abandon();
    return false;
  }
  const FailureDetector::Finding found = detector_.Look();
  switch (found.what) {
    case FailureDetector::Finding::What::kNothing:
      return CountInFlight(ranks_) > 0;
    case FailureDetector::Finding::What::kLookAgainSoon:
      return true;
    case FailureDetector::Finding::What::kFailure:
      Fail(found.reason, found.names_a_call, found.dump);
      Abandon();
      return false;
  }
  return false;
}

bool Health::Refuse(State state, const Status& reason, bool names_a_call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed()) return false;
  failure_ = reason;
  failure_names_call_ = names_a_call;
  state_.store(state, std::memory_order_release);
  return true;
}

bool Health::SetFailed(const Status& reason, bool names_a_call) {
  if (!Refuse(State::kFailed, reason, names_a_call)) return false;
  if (poison_ == nullptr) return true;
  // Before any abort.
  poison_->Set();
  // NCCL's abort ends the operations of all that share resources, but not our kernels.
  for (Engine* engine : engines_) engine->Stop();
  return true;
}

void Health::Fail(const Status& reason, bool names_a_call, const char* dump,
                  OnFailure how) {
  if (failed()) return;
  RecordFirstFailure(std::string(reason.message()));
  // A moment for what is about to end, such as the other local ranks' part.
  const bool is_idle = IsIdleSoon();
  const char* const meaning = MeaningOf(is_idle, how);
  const Status failure(*reason.errc(), StrCat(reason.message(), meaning));
  if (!SetFailed(failure, names_a_call)) return;
  policy_.world->SetBroken();
  if (policy_.shares) {
    const Status together(
        *reason.errc(),
        StrCat(reason.message(), ". Communicators that share resources fail together",
               meaning));
    for (const auto& sharer : policy_.world->sharers()) sharer->FailToo(together);
  }
  if (!is_idle || AnyBusy()) {
    // An operation may have been given to a device since the reason was found.
    const std::string text =
        StrCat(names_a_call ? "" : FirstOperationOfAny(), failure.message());
    if (how == OnFailure::kExit) EndProcess(text);
    if (how == OnFailure::kPoison) {
      AbortElsewhere();
    } else {
      StopDevices(text);
    }
    if (dump != nullptr) DumpFlightRecords(dump);
    for (const auto& rank : ranks_) rank->queue.Fail();
  }
  for (Engine* engine : engines_) engine->Refuse(failure);
}

void Health::FailStuck(const Status& reason) {
  Fail(reason);
  if (!DevicesAreStopped()) AbortElsewhere();
}

void Health::FailElsewhere(const std::string& reason) {
  const bool is_here = std::all_of(
      spec_.processes.begin(), spec_.processes.end(), [](const auto& of_group) {
        return std::all_of(of_group.begin(), of_group.end(),
                           [&](int process) { return process == of_group[0]; });
      });
  if (is_here || failed() || DevicesAreStopped()) return;
  Fail(Status(ErrorCode::kAborted, StrCat(NameOf(spec_), ": ", reason)),
       /*names_a_call=*/false);
  Abandon();
}

Status Health::FailureOf(const Call& call, const RankFacts& rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
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
  const auto begin = Clock::now();
  const auto may_wait = [&](double seconds) {
    const double limit = std::min(seconds, spec_.timeout_seconds);
    return Clock::now() - begin < std::chrono::duration<double>(limit);
  };
  while (!failed() && (Poll() ? may_wait(kCloseSeconds)
                              : HaveWork(ranks_) && may_wait(kGiveSeconds))) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!failed() && HaveWork(ranks_)) {
    // A process that ends by itself, and closes what it has, keeps its status.
    const bool exits = policy_.on_failure == OnFailure::kExit;
    Fail(reason, /*names_a_call=*/true, /*dump=*/nullptr,
         exits ? OnFailure::kRaise : policy_.on_failure);
  } else {
    Refuse(State::kStopping, reason, /*names_a_call=*/true);
    for (Engine* engine : engines_) engine->Refuse(reason);
  }
  Abandon();
  // Unregister here, so that the last reference, and with it the slow destructor, is
  // released on this thread and not on the watch's.
  Unwatch(*this);
}

void Health::Abandon() {
  if (library_.test_double == nullptr) return;
  library_.test_double->abandon(policy_.world.get(), this);
}

void Health::AbortElsewhere() {
  const std::shared_ptr<void> owner = owner_.lock();
  if (owner == nullptr) return;  // it is being destroyed, which aborts
  for (const auto& rank : ranks_) {
    // The owner goes with the function, and may end there.
    const Status started =
        StartDetached([this, owner, each = rank.get()] { AbortRank(*each); });
    if (started.success()) continue;
    EndProcess(StrCat("a collective failed, and no thread can be had to end it: ",
                      failure().message()));
  }
}

void Health::AbortRank(LocalRank& rank) {
  // NCCL ends what runs, and then waits for the graphs that refer to the communicator,
  // which XLA keeps for as long as their programs.
  std::optional<LastResort> end;
  if (!rank.queue.was_captured()) {
    end.emplace(kAbortSeconds, StrCat("NCCL did not end ", NameOf(spec_), " within ",
                                      kAbortSeconds, " s"));
  }
  for (Engine* engine : engines_) engine->Abort(rank);
}

}  // namespace jaxcomm
