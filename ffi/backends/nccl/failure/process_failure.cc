#include "ffi/backends/nccl/failure/process_failure.h"

#include <chrono>
#include <utility>

#include "ffi/backends/nccl/engines/engine.h"
#include "ffi/backends/nccl/failure/failure_detector.h"
#include "ffi/backends/nccl/failure/health.h"
#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/failure/world_health.h"
#include "ffi/backends/nccl/queue/local_rank.h"
#include "ffi/core/last_resort.h"
#include "ffi/core/watchdog.h"
#include "ffi/flight/flight_dump.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

// For other processes to poison what they run: their threads look ten times a second.
constexpr std::chrono::seconds kSettle{10};

constexpr char kTogether[] =
    ". All communicators of NCCL in this process fail together";
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

}  // namespace

ProcessFailure& ProcessFailure::Get() {
  static ProcessFailure& failure = *new ProcessFailure;
  return failure;
}

void ProcessFailure::Add(const Health* health, std::weak_ptr<Health> kept) {
  MutexLock lock(mutex_);
  of_[health] = std::move(kept);
}

void ProcessFailure::Remove(const Health* health) {
  MutexLock lock(mutex_);
  of_.erase(health);
}

ProcessFailure::All ProcessFailure::all() {
  All all;
  MutexLock lock(mutex_);
  for (const auto& [health, kept] : of_) {
    if (auto each = kept.lock()) all.push_back(std::move(each));
  }
  return all;
}

std::optional<OnFailure> ProcessFailure::Strictest(const All& all) {
  std::optional<OnFailure> found;
  for (const auto& each : all) {
    if (each->is_busy()) {
      found = std::max(found.value_or(OnFailure::kPoison), each->policy_.on_failure);
    }
  }
  return found;
}

std::optional<OnFailure> ProcessFailure::StrictestSoon(const All& all) {
  std::optional<OnFailure> found;
  (void)Wait({FailureDetector::kDrainAfterPeerExit.count() * 1e-3}, "", [&] {
    for (const auto& each : all) Refresh(each->ranks_);
    found = Strictest(all);
    return !found.has_value();
  });
  return found;
}

void ProcessFailure::Fail(Health& one, const Cause& cause) {
  if (one.failed()) return;
  All every = all();
  const auto allowed = [&cause](std::optional<OnFailure> how) {
    return cause.is_closing && how == OnFailure::kExit ? OnFailure::kRaise : how;
  };
  std::optional<OnFailure> how = allowed(StrictestSoon(every));
  All failing;
  if (!FailTogether(one, every, cause, MeaningOf(how), &failing)) return;
  {
    // Not before all are poisoned: it tells other processes that they may abort.
    MutexLock lock(mutex_);
    if (first_.empty()) first_ = cause.reason.message();
  }
  // A stream may have been given an operation since.
  how = std::max(how, allowed(Strictest(every)));
  if (how.has_value()) {
    std::string text;
    for (const auto& each : every) {
      if (!cause.names_a_call && text.empty()) {
        text = FirstOperation(each->ranks_, each->spec_);
      }
    }
    text += one.failure().message();
    if (how == OnFailure::kExit) EndProcess(text);
    if (how == OnFailure::kRaise) {
      StopDevices(text, one.WorthWaitingFor(cause.reason),
                  std::chrono::duration<double>(one.spec_.timeout_seconds));
    }
  }
  for (const auto& each : failing) {
    AbortElsewhere(*each,
                   how == OnFailure::kPoison ? Ends::kPoisoned : Ends::kThreadsInNccl);
  }
  if (how.has_value()) {
    if (cause.dump != nullptr) DumpFlightRecords(cause.dump);
    for (const auto& each : failing) {
      for (const auto& rank : each->ranks_) rank->queue.Fail();
    }
  }
  for (const auto& each : failing) each->RefuseInEngines();
  WakeWatchdog();
  // The last reference, and with it a slow destructor, must not be released on the
  // watch's thread. Where no thread can be had, it is.
  failing.clear();
  (void)StartDetached([released = std::move(every)] {});
}

bool ProcessFailure::FailTogether(Health& one, const All& all, const Cause& cause,
                                  const char* meaning, All* failing) {
  const auto because = [&](const char* more) {
    return Status(*cause.reason.errc(), StrCat(cause.reason.message(), more, meaning));
  };
  if (!one.SetFailed(because(""), cause.names_a_call)) return false;
  const Status together = because(kTogether);
  for (const auto& each : all) {
    if (each.get() != &one && !each->SetFailed(together, /*names_a_call=*/false)) {
      continue;
    }
    each->policy_.world->SetBroken(together.message());
    failing->push_back(each);
  }
  return true;
}

void ProcessFailure::FailAllElsewhere(const std::string& reason) {
  for (const auto& each : all()) {
    if (each->is_of_one_process() || DevicesAreStopped()) continue;
    // The other process may abort once this returns.
    if (each->failed()) {
      if (each->poison_ != nullptr) each->poison_->Set();
      continue;
    }
    Fail(*each, {Status(ErrorCode::kAborted, StrCat(NameOf(each->spec_), ": ", reason)),
                 /*names_a_call=*/false});
  }
}

void ProcessFailure::FailStopped(Health& one) {
  one.SetFailed(DevicesStoppedError(), /*names_a_call=*/false);
  for (const auto& rank : one.ranks_) rank->queue.Fail();
  one.RefuseInEngines();
  AbortElsewhere(one, Ends::kThreadsInNccl);
}

bool ProcessFailure::IsAnyBusy() {
  // Without keeping any, so that none is released on this thread.
  MutexLock lock(mutex_);
  return std::any_of(of_.begin(), of_.end(),
                     [](const auto& each) { return each.first->is_busy(); });
}

bool ProcessFailure::WaitForAborts(double seconds) {
  return Wait({seconds}, "", [this] { return aborts_.load() == 0; }).success();
}

std::string ProcessFailure::first() {
  MutexLock lock(mutex_);
  return first_;
}

void ProcessFailure::Forget() {
  ForgetThatCameTooLate();
  MutexLock lock(mutex_);
  first_.clear();
}

void ProcessFailure::AbortElsewhere(Health& health, Ends what) {
  std::shared_ptr<void> owner = health.owner_.lock();
  if (owner == nullptr) return;  // it is being destroyed, which aborts
  for (const auto& rank : health.ranks_) {
    if (what == Ends::kThreadsInNccl && !health.IsInNccl(*rank)) continue;
    // The owner goes with the function, and may end there.
    aborts_ += 1;
    const Status started = StartDetached(
        [this, owner, what, &health, each = rank.get()]() mutable {
          AbortRank(health, *each, what);
          owner.reset();
          aborts_ -= 1;
        },
        "jaxcomm-abort");
    if (started.success()) continue;
    EndProcess(StrCat("a collective failed, and no thread can be had to end it: ",
                      health.failure().message()));
  }
}

void ProcessFailure::AbortRank(Health& health, LocalRank& rank, Ends what) {
  if (what == Ends::kPoisoned && !health.policy_.world->WaitUntilSettled(kSettle)) {
    EndProcess(StrCat(health.failure().message(),
                      ". A process that takes part did not say within ",
                      kSettle.count(), " s that it knows. If NCCL were ",
                      "stopped here, that process could read wrong numbers"));
  }
  // An aborted operation would let a stream go on.
  WaitForDeviceStop();
  if (what == Ends::kThreadsInNccl && !health.IsInNccl(rank)) return;
  // NCCL ends what runs, and then waits for the graphs that refer to the communicator,
  // which XLA keeps for as long as their programs.
  std::optional<LastResort> end;
  if (!rank.queue.was_captured()) {
    end.emplace(Health::kAbortSeconds, StrCat("NCCL did not end ", NameOf(health.spec_),
                                              " within ", Health::kAbortSeconds, " s"));
  }
  // NCCL last, which was added first: its abort waits for the device.
  for (size_t i = health.engines_.size(); i-- > 0;) health.engines_[i]->Abort(rank);
}

}  // namespace jaxcomm
