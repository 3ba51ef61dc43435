#include "ffi/backends/nccl/failure/health.h"

#include <algorithm>
#include <utility>

#include "ffi/backends/nccl/engines/engine.h"
#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/queue/local_rank.h"

namespace jaxcomm {
namespace {

// For the watch to look at one communicator once it knows that a process has ended.
constexpr double kLookSeconds = 5;
// How long Close() waits for operations in flight.
constexpr double kCloseSeconds = 10;
// How long it waits for a thread that is about to give a stream an operation. It may be
// slow to run, or wait in NCCL for another rank.
constexpr double kGiveSeconds = 1;

}  // namespace

Health::Health(const CommunicatorSpec& spec, Policy policy, const LocalRanks& ranks)
    : spec_(spec),
      policy_(std::move(policy)),
      ranks_(ranks),
      detector_(spec, *policy_.world, ranks, engines_) {}

Health::~Health() {
  if (is_watched_) --num_watched_;
  ProcessFailure::Get().Remove(this);
}

void Health::SetOwner(const std::shared_ptr<void>& owner) {
  owner_ = owner;
  ProcessFailure::Get().Add(this, std::shared_ptr<Health>(owner, this));
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
  RETURN_IF_ERROR(Broken());
  if (!policy_.world->is_broken()) return OkStatus();
  // Of the call alone: what is in flight may come to its end.
  return FailedPrecondition("the communicators of this mesh take no more calls: ",
                            policy_.world->why_broken(),
                            ". Call jaxcomm.finalize() in every process, then "
                            "jaxcomm.init()");
}

NcclPatience Health::WhileWell(NcclPatience patience) const {
  patience.refusal = [this] { return Broken(); };
  patience.lost_peers = [this]() -> std::string {
    // What others are at may do without the process, and would be stopped.
    return policy_.world->any_gone() && !ProcessFailure::Get().IsAnyBusy()
               ? detector_.LostPeers()
               : "";
  };
  return patience;
}

bool Health::is_busy() const { return AreBusy(ranks_); }

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
    ProcessFailure::Get().FailStopped(*this);
  }
  if (failed()) return false;
  const FailureDetector::Finding found = detector_.Look();
  switch (found.what) {
    case FailureDetector::Finding::What::kNothing:
      return HaveWork(ranks_);
    case FailureDetector::Finding::What::kLookAgainSoon:
      return true;
    case FailureDetector::Finding::What::kFailure:
      Fail(found.cause);
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
  return Refuse(State::kFailed, reason, names_a_call);
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
  Fail({Status(*status.errc(), StrCat(call.site->description(), " (lane '", spec_.lane,
                                      "'): ", status.message()))});
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
    Fail({reason, /*names_a_call=*/true, /*dump=*/nullptr, /*is_closing=*/true});
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

}  // namespace jaxcomm
