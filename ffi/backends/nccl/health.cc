#include "ffi/backends/nccl/health.h"

#include <algorithm>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/engines/engine.h"
#include "ffi/backends/nccl/local_rank.h"
#include "ffi/core/last_resort.h"
#include "ffi/flight/flight_dump.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

// How long operations may take to end when a process that takes part in them has ended:
// it may have done so in order, with its part in flight.
constexpr auto kDrainAfterPeerExit = std::chrono::milliseconds(20);
// How much earlier than the system NCCL may learn of that, on a machine that is busy.
constexpr auto kWaitForPeerExitAfterNcclError = std::chrono::milliseconds(500);
// For NCCL's kernels to leave after an abort, and for the watch to look at one
// communicator once it knows that a process has ended.
constexpr double kAbortSeconds = 10;
constexpr double kLookSeconds = 5;
// How long Close() waits for operations in flight.
constexpr double kCloseSeconds = 10;

constexpr char kStopped[] =
    ". No result of it is handed out: the GPUs of this process were stopped, and every "
    "use of them raises from now on. End this process and start it anew";
constexpr char kStoppedBorrowed[] =
    ". The communicator is XLA's, and the GPUs of this process are stopped: every use "
    "of them raises from now on. End this process and start it anew";
constexpr char kPoisoned[] =
    ". Every bit of its results is set, which is NaN for floats. Call "
    "jaxcomm.finalize(), then jaxcomm.init()";
constexpr char kIdle[] =
    ". Nothing was on its way. Call jaxcomm.finalize() in every process, then "
    "jaxcomm.init()";

const char* MeaningOf(bool is_idle, OnFailure how, bool is_borrowed) {
  if (is_borrowed) return kStoppedBorrowed;
  if (is_idle) return kIdle;
  if (how == OnFailure::kPoison) return kPoisoned;
  return how == OnFailure::kRaise ? kStopped : "";
}

std::chrono::steady_clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

Health::Health(const CommunicatorSpec& spec, const NcclLibrary& library, Policy policy)
    : spec_(spec), library_(library), policy_(std::move(policy)) {}

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

std::string Health::Name() const {
  return StrCat("the communicator over axes ", spec_.axes, " (lane '", spec_.lane,
                "')");
}

std::string Health::Describe(const LocalRank& rank,
                             const InFlight::Overdue& operation) const {
  return jaxcomm::Describe(operation, spec_, rank.facts);
}

// ---- what is in flight
// ----------------------------------------------------------------

int64_t Health::in_flight() const {
  int64_t count = 0;
  for (const LocalRank* rank : ranks_) count += rank->queue.size();
  return count;
}

bool Health::has_work() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const LocalRank* rank) { return rank->queue.has_work(); });
}

bool Health::was_captured() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const LocalRank* rank) { return rank->queue.was_captured(); });
}

bool Health::AnyBusy() const {
  if (is_busy()) return true;
  if (!policy_.shares) return false;
  const auto sharers = policy_.world->sharers();
  return std::any_of(sharers.begin(), sharers.end(),
                     [](const auto& sharer) { return sharer->is_busy(); });
}

bool Health::IsIdleSoon() {
  const auto end = Clock::now() + kDrainAfterPeerExit;
  while (true) {
    for (LocalRank* rank : ranks_) rank->queue.Refresh();
    if (!AnyBusy()) return true;
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::string Health::FirstOperation() {
  for (LocalRank* rank : ranks_) {
    const InFlight::Overdue first = rank->queue.First();
    if (first.found) return Describe(*rank, first);
  }
  return "";
}

std::vector<std::unique_lock<std::timed_mutex>> Health::LockAll(bool wait_until_idle) {
  std::vector<std::unique_lock<std::timed_mutex>> locks;
  while (true) {
    bool has_all = true;
    for (LocalRank* rank : ranks_) {
      locks.emplace_back(rank->queue.launching, std::try_to_lock);
      has_all = has_all && locks.back().owns_lock();
      rank->queue.Refresh();
    }
    if (failed() || (has_all && (!wait_until_idle || in_flight() == 0))) return locks;
    locks.clear();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// ---- looking for failures
// -------------------------------------------------------------

double Health::poll_seconds() const {
  const bool any_gone = policy_.world != nullptr && policy_.world->any_gone();
  return any_gone ? kLookSeconds : spec_.timeout_seconds + kAbortSeconds;
}

bool Health::Poll() {
  std::unique_lock<std::mutex> lock(polling_, std::try_to_lock);
  if (!lock) return !failed();  // another thread polls it
  if (failed()) return false;
  if (DevicesAreStopped()) {
    SetFailed(DevicesStoppedError(), /*names_a_call=*/false);
    for (Engine* engine : engines_) engine->Refuse(failure());
    for (LocalRank* rank : ranks_) rank->queue.Fail();
    Abandon();
    return false;
  }
  if (LosePeers()) return !failed();
  for (LocalRank* rank : ranks_) {
    if (failed()) return false;
    if (PollRank(*rank)) return !failed();
  }
  return in_flight() > 0;
}

bool Health::PollRank(LocalRank& rank) {
  InFlight::Overdue overdue = rank.queue.Poll(Seconds(spec_.timeout_seconds));
  for (Engine* engine : engines_) {
    Status error = engine->AsyncError(rank);
    if (error.success()) continue;
    overdue = rank.queue.Poll(Seconds(spec_.timeout_seconds));
    overdue.found = true;
    overdue.status = std::move(error);
  }
  if (!overdue.found || DevicesAreStopped()) return false;
  const bool is_late = overdue.status.success();
  if (!is_late && policy_.world != nullptr && policy_.world->sees_peers()) {
    // NCCL may be the first to notice that a process has ended; it does not say which.
    if (error_seen_ == Clock::time_point()) error_seen_ = Clock::now();
    if (Clock::now() - error_seen_ < kWaitForPeerExitAfterNcclError) return true;
  }
  std::string text = Describe(rank, overdue);
  text += is_late ? DescribeLate(spec_) : overdue.status.message();
  Fail(Status(is_late ? ErrorCode::kDeadlineExceeded : ErrorCode::kUnavailable,
              std::move(text)),
       /*names_a_call=*/true, is_late ? "timeout" : "error");
  Abandon();
  return true;
}

std::string Health::LostPeers() const {
  std::string lost;
  const std::vector<int> gone = policy_.world->gone();
  for (const LocalRank* mine : ranks_) {
    const std::vector<int>& processes = spec_.processes[mine->facts.group];
    for (size_t rank = 0; rank < processes.size(); ++rank) {
      if (std::find(gone.begin(), gone.end(), processes[rank]) == gone.end()) continue;
      const std::string text =
          StrCat("process ", processes[rank], " (rank ", rank, ")");
      if (lost.find(text) != std::string::npos) continue;
      lost += StrCat(lost.empty() ? "" : ", ", text);
    }
  }
  return lost;
}

bool Health::LosePeers() {
  if (policy_.world == nullptr || !policy_.world->any_gone() ||
      spec_.processes.empty()) {
    return false;
  }
  const std::string lost = LostPeers();
  if (lost.empty()) return false;
  if (peer_lost_ == Clock::time_point()) peer_lost_ = Clock::now();
  if (in_flight() > 0 && Clock::now() - peer_lost_ < kDrainAfterPeerExit) return true;
  std::string text = FirstOperation();
  const bool names_a_call = !text.empty();
  // What is in flight may be an operation of one that fails together with this one.
  if (text.empty() && policy_.shares) {
    for (const auto& sharer : policy_.world->sharers()) {
      if (text.empty()) text = sharer->FirstOperation();
    }
  }
  if (text.empty()) text = StrCat(Name(), ": ");
  Fail(Status(ErrorCode::kAborted, StrCat(text, lost, " has ended")), names_a_call,
       "peer gone");
  Abandon();
  return true;
}

// ---- failing
// --------------------------------------------------------------------------

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
  const bool is_borrowed = policy_.world == nullptr;
  // A moment for what is about to end, such as the other local ranks' part. What XLA's
  // communicators have in flight is not all known here.
  const bool is_idle = !is_borrowed && IsIdleSoon();
  const char* const meaning = MeaningOf(is_idle, how, is_borrowed);
  const Status failure(*reason.errc(), StrCat(reason.message(), meaning));
  if (!SetFailed(failure, names_a_call)) return;
  if (!is_borrowed) policy_.world->SetBroken();
  if (policy_.shares) {
    const Status together(
        *reason.errc(),
        StrCat(reason.message(), ". Communicators that share resources fail together",
               meaning));
    for (const auto& sharer : policy_.world->sharers()) sharer->FailToo(together);
  }
  if (!is_idle || AnyBusy()) {
    const std::string text(failure.message());
    if (how == OnFailure::kExit) EndProcess(text);
    if (how == OnFailure::kPoison) {
      AbortElsewhere();
    } else {
      StopDevices(text);
    }
    if (dump != nullptr) DumpFlightRecords(dump);
    for (LocalRank* rank : ranks_) rank->queue.Fail();
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
  Fail(Status(ErrorCode::kAborted, StrCat(Name(), ": ", reason)),
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
  const bool is_borrowed = policy_.world == nullptr;
  const bool is_late = status.errc() == ErrorCode::kDeadlineExceeded;
  const bool is_of_call = status.errc() == ErrorCode::kFailedPrecondition ||
                          // XLA ends its communicators, but the next call would wait
                          // for as long.
                          (is_borrowed && !is_late);
  if (!is_of_call) {
    return FailBy(
        call, rank,
        Status(is_borrowed ? ErrorCode::kDeadlineExceeded : ErrorCode::kInternal,
               std::string(of_rank.message())));
  }
  return Status(
      is_borrowed ? ErrorCode::kInternal : ErrorCode::kFailedPrecondition,
      StrCat(call.site->description(), " (lane '", spec_.lane, "'",
             is_borrowed ? ", XLA's communicator): " : "): ", of_rank.message()));
}

Status Health::FailBy(const Call& call, const RankFacts& rank, const Status& status) {
  if (failed()) return FailureOf(call, rank);
  if (DevicesAreStopped()) return DevicesStoppedError();
  Fail(Status(*status.errc(), StrCat(call.site->description(), " (lane '", spec_.lane,
                                     "'): ", status.message())));
  return FailureOf(call, rank);
}

void Health::Close(const Status& reason) {
  const auto end =
      Clock::now() + Seconds(std::min(kCloseSeconds, spec_.timeout_seconds));
  while (!failed() && Poll() && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!failed() && has_work()) {
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

// ---- ending what hangs
// ----------------------------------------------------------------

void Health::AbortElsewhere() {
  const std::shared_ptr<void> owner = owner_.lock();
  if (owner == nullptr) return;  // it is being destroyed, which aborts
  for (LocalRank* rank : ranks_) {
    std::thread thread;
    // The owner goes with the function, and may end there.
    if (StartThread([this, owner, rank] { AbortRank(*rank); }, &thread).failure()) {
      EndProcess(StrCat("a collective failed, and no thread can be had to end it: ",
                        failure().message()));
    }
    thread.detach();
  }
}

void Health::AbortRank(LocalRank& rank) {
  // NCCL ends what runs, and then waits for the graphs that refer to the communicator,
  // which XLA keeps for as long as their programs.
  std::optional<LastResort> end;
  if (!rank.queue.was_captured()) {
    end.emplace(kAbortSeconds,
                StrCat("NCCL did not end ", Name(), " within ", kAbortSeconds, " s"));
  }
  for (Engine* engine : engines_) engine->Abort(rank);
}

Status Health::RunPatiently(const char* what, const NcclPatience& patience,
                            std::function<Status()> call) {
  auto promise = std::make_shared<std::promise<Status>>();
  auto answer = promise->get_future();
  std::thread thread;
  RETURN_IF_ERROR(StartThread([owner = owner_.lock(), promise,
                               call = std::move(call)] { promise->set_value(call()); },
                              &thread));
  const auto end = Clock::now() + Seconds(patience.seconds);
  while (answer.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    Status status = OkStatus();
    if (patience.interrupted()) {
      status = Status(ErrorCode::kCancelled, "interrupted");
    } else if (Clock::now() > end) {
      status =
          Status(ErrorCode::kDeadlineExceeded,
                 StrCat(what, " with ", Name(), " is not done after ", patience.seconds,
                        " s; other processes may not have come to it"));
    }
    if (status.success()) continue;
    thread.detach();
    FailStuck(status);
    return status;
  }
  thread.join();
  return answer.get();
}

}  // namespace jaxcomm
