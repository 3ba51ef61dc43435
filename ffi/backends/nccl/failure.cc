// How a communicator fails: what is on its way, what is read of it, and who is told.
#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"
#include "ffi/core/last_resort.h"
#include "ffi/flight/flight_dump.h"

namespace jaxcomm {
namespace {

// How long operations may take to end when a process that takes part in them has ended:
// it may have done so in order, with its part on its way.
constexpr auto kDrainAfterPeerExit = std::chrono::milliseconds(20);
// How much earlier than the system NCCL may learn of that, on a machine that is busy.
constexpr auto kWaitForPeerExitAfterNcclError = std::chrono::milliseconds(500);
// For NCCL's kernels to leave after an abort, and for the watch to look at one
// communicator once it knows that a process has ended.
constexpr double kAbortSeconds = 10;
constexpr double kLookSeconds = 5;

constexpr char kStopped[] =
    ". No result of it is handed out: the GPUs of this process were stopped, and every "
    "use of them raises from now on. End this process and start it anew";
constexpr char kPoisoned[] =
    ". Every bit of its results is set, which is NaN for floats. Call "
    "jaxcomm.finalize(), then jaxcomm.init()";
constexpr char kIdle[] =
    ". Nothing was on its way. Call jaxcomm.finalize() in every process, then "
    "jaxcomm.init()";

Status WithMeaning(const Status& reason, const char* meaning) {
  return Status(*reason.errc(), StrCat(reason.message(), meaning));
}

}  // namespace

Status NcclCommunicator::BeWatched() {
  const auto self =
      std::static_pointer_cast<NcclCommunicator>(Watched::shared_from_this());
  if (shares_memory()) how_.world->AddSharer(self);
  return Watch(self);
}

std::string NcclCommunicator::FirstOperation() {
  for (auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->context);
    const InFlight::Overdue first = rank->in_flight.First();
    if (first.found) return Describe(*rank, first);
  }
  return "";
}

double NcclCommunicator::poll_seconds() const {
  return how_.world->any_gone() ? kLookSeconds : spec().timeout_seconds + kAbortSeconds;
}

// What a graph runs is not seen.
bool NcclCommunicator::is_busy() { return has_work() || was_captured(); }

bool NcclCommunicator::was_captured() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const auto& rank) { return rank->in_flight.was_captured(); });
}

bool NcclCommunicator::AnyBusy() {
  if (is_busy()) return true;
  if (!shares_memory()) return false;
  const auto sharers = how_.world->sharers();
  return std::any_of(sharers.begin(), sharers.end(),
                     [](const auto& sharer) { return sharer->is_busy(); });
}

bool NcclCommunicator::LosePeers() {
  if (!how_.world->any_gone() || spec().processes.empty()) return false;
  std::string lost;
  const std::vector<int> gone = how_.world->gone();
  for (const auto& mine : ranks_) {
    const std::vector<int>& processes = spec().processes[mine->group];
    for (size_t rank = 0; rank < processes.size(); ++rank) {
      if (std::find(gone.begin(), gone.end(), processes[rank]) == gone.end()) continue;
      const std::string text =
          StrCat("process ", processes[rank], " (rank ", rank, ")");
      if (lost.find(text) == std::string::npos) {
        lost += StrCat(lost.empty() ? "" : ", ", text);
      }
    }
  }
  if (lost.empty()) return false;
  const Clock::time_point now = Clock::now();
  if (peer_lost_ == Clock::time_point()) peer_lost_ = now;
  if (InFlightCount() > 0 && now - peer_lost_ < kDrainAfterPeerExit) return true;
  std::string text = FirstOperation();
  const bool is_in_call = !text.empty();
  // What is on its way may be an operation of one that fails together with this one.
  if (text.empty() && shares_memory()) {
    for (const auto& sharer : how_.world->sharers()) {
      if (text.empty()) text = sharer->FirstOperation();
    }
  }
  if (text.empty()) {
    text = StrCat("the communicator over axes ", spec().axes, " (lane '", spec().lane,
                  "'): ");
  }
  Fail(Status(ErrorCode::kAborted, StrCat(text, lost, " has ended")), is_in_call,
       "peer gone");
  Abandon();
  return true;
}

bool NcclCommunicator::Poll() {
  std::unique_lock<std::mutex> lock(polling_, std::try_to_lock);
  if (!lock) return !failed();  // someone else is at it
  if (failed()) return false;
  if (DevicesAreStopped()) {
    SetFailure(DevicesStoppedError(), /*names=*/false);
    if (copies_ != nullptr) copies_->Fail(failure());
    for (auto& rank : ranks_) rank->in_flight.Fail();
    Abandon();
    return false;
  }
  if (LosePeers()) return !failed();
  for (auto& rank : ranks_) {
    if (failed()) return false;
    CurrentContext current(library_.cuda, rank->context);
    nccl::Result state = nccl::kSuccess;
    InFlight::Overdue overdue =
        rank->in_flight.Poll(Clock::now(), Seconds(spec().timeout_seconds));
    if (!overdue.found && copies_ != nullptr) {
      overdue = copies_->in_flight(rank->place)
                    .Poll(Clock::now(), Seconds(spec().timeout_seconds));
    }
    if (rank->in_flight.size() > 0 && rank->comm != nullptr) {
      std::unique_lock<std::timed_mutex> launching(rank->launching, std::try_to_lock);
      const nccl::Comm comm = rank->comm;
      if (launching && comm != nullptr &&
          library_.nccl.CommGetAsyncError(comm, &state) == nccl::kSuccess &&
          state != nccl::kSuccess && state != nccl::kInProgress) {
        overdue = rank->in_flight.Poll(Clock::now(), Seconds(spec().timeout_seconds));
        overdue.found = true;
        overdue.status = library_.Check(state, "NCCL", comm);
      }
    }
    if (!overdue.found || DevicesAreStopped()) continue;
    const bool is_late = overdue.status.success();
    if (!is_late && how_.world->has_peers()) {
      // NCCL may be the first to notice that a process has ended; it does not say
      // which.
      if (error_seen_ == Clock::time_point()) error_seen_ = Clock::now();
      if (Clock::now() - error_seen_ < kWaitForPeerExitAfterNcclError) return true;
    }
    std::string text = Describe(*rank, overdue);
    text += is_late ? DescribeLate(spec()) : overdue.status.message();
    Fail(Status(is_late ? ErrorCode::kDeadlineExceeded : ErrorCode::kUnavailable,
                std::move(text)),
         /*names=*/true, is_late ? "timeout" : "error");
    Abandon();
    return false;
  }
  return InFlightCount() > 0;
}

bool NcclCommunicator::IsIdleSoon() {
  const auto end = Clock::now() + kDrainAfterPeerExit;
  while (true) {
    for (auto& rank : ranks_) {
      CurrentContext current(library_.cuda, rank->context);
      rank->in_flight.Refresh();
      if (copies_ != nullptr) copies_->in_flight(rank->place).Refresh();
    }
    if (!AnyBusy()) return true;
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool NcclCommunicator::Refuse(const Status& reason, bool names) {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failed()) return false;
  failure_ = reason;
  failed_between_calls_ = !names;
  failed_.store(true, std::memory_order_release);
  return true;
}

bool NcclCommunicator::SetFailure(const Status& reason, bool names) {
  if (!Refuse(reason, names)) return false;
  is_broken_ = true;
  if (poisoned_ == nullptr) return true;
  // Before any abort: what an aborted kernel leaves behind is not to be read.
  __atomic_store_n(poisoned_, 1u, __ATOMIC_SEQ_CST);
  // NCCL's abort ends the operations of all that share resources, but not our kernels.
  if (one_shot_ != nullptr) one_shot_->Stop();
  return true;
}

void NcclCommunicator::Fail(const Status& reason, bool names, const char* dump,
                            OnFailure how) {
  if (failed()) return;
  RecordFirstFailure(std::string(reason.message()));
  // A moment for what is about to end, such as the other local ranks' part.
  const bool is_idle = IsIdleSoon();
  const char* const meaning = is_idle                     ? kIdle
                              : how == OnFailure::kPoison ? kPoisoned
                              : how == OnFailure::kRaise  ? kStopped
                                                          : "";
  const Status told = WithMeaning(reason, meaning);
  if (!SetFailure(told, names)) return;
  how_.world->SetBroken();
  if (shares_memory()) {
    const Status first = WithMeaning(
        reason,
        StrCat(". Communicators that share resources fail together", meaning).c_str());
    for (const auto& sharer : how_.world->sharers()) sharer->FailToo(first);
  }
  if (!is_idle || AnyBusy()) {
    const std::string text(told.message());
    if (how == OnFailure::kExit) EndProcess(text);
    if (how == OnFailure::kPoison) {
      AbortElsewhere();
    } else {
      StopDevices(text);
    }
    if (dump != nullptr) DumpFlightRecords(dump);
    for (auto& rank : ranks_) {
      rank->in_flight.Fail();
      if (copies_ != nullptr) copies_->in_flight(rank->place).Fail();
    }
  }
  if (copies_ != nullptr) copies_->Fail(told);
}

void NcclCommunicator::FailStuck(const Status& reason) {
  Fail(reason);
  if (!DevicesAreStopped()) AbortElsewhere();
}

void NcclCommunicator::FailElsewhere(const std::string& reason) {
  const bool is_here = std::all_of(
      spec().processes.begin(), spec().processes.end(), [](const auto& of_group) {
        return std::all_of(of_group.begin(), of_group.end(),
                           [&](int process) { return process == of_group[0]; });
      });
  if (is_here || failed() || DevicesAreStopped()) return;
  Fail(Status(ErrorCode::kAborted, StrCat("the communicator over axes ", spec().axes,
                                          " (lane '", spec().lane, "'): ", reason)),
       /*names=*/false);
  Abandon();
}

void NcclCommunicator::AbortElsewhere() {
  const auto self =
      std::static_pointer_cast<NcclCommunicator>(Watched::weak_from_this().lock());
  if (self == nullptr) return;  // it is being destroyed, which aborts
  const auto abort = [](std::shared_ptr<NcclCommunicator> self, Rank* rank) {
    // NCCL ends what runs, and then waits for the graphs that refer to the
    // communicator, which XLA keeps for as long as their programs.
    std::optional<LastResort> end;
    if (!rank->in_flight.was_captured()) {
      end.emplace(
          kAbortSeconds,
          StrCat("NCCL did not end the communicator over axes ", self->spec().axes,
                 " (lane '", self->spec().lane, "') within ", kAbortSeconds, " s"));
    }
    nccl::Comm comm = nullptr;
    {
      // Who holds it for longer is inside NCCL, and is let go by the abort alone.
      std::unique_lock<std::timed_mutex> launching(
          rank->launching,
          std::chrono::system_clock::now() + std::chrono::milliseconds(100));
      comm = rank->comm.exchange(nullptr);
    }
    if (comm != nullptr) self->library_.nccl.CommAbort(comm);
  };
  try {
    for (auto& rank : ranks_) std::thread(abort, self, rank.get()).detach();
  } catch (const std::system_error&) {
    EndProcess(StrCat("a collective failed, and no thread can be had to end it: ",
                      failure().message()));
  }
}

Status NcclCommunicator::GivePoison(const Call& call, const Rank& rank,
                                    cuda::Stream stream) {
  PoisonArguments arguments;
  arguments.word = reinterpret_cast<uint64_t>(poisoned_);
  const auto give = [&] {
    const Status status = rank.kernels->Poison(arguments, stream);
    arguments.count = 0;
    return status;
  };
  for (size_t i = 0; i < call.site->results().size(); ++i) {
    const auto bytes = static_cast<uint64_t>(call.site->results()[i].bytes());
    if (bytes == 0) continue;
    arguments.results[arguments.count++] = {reinterpret_cast<uint64_t>(call.results[i]),
                                            bytes};
    if (arguments.count < PoisonArguments::kMostPoisoned) continue;
    if (Status status = give(); status.failure()) return status;
  }
  return arguments.count == 0 ? OkStatus() : give();
}

}  // namespace jaxcomm
