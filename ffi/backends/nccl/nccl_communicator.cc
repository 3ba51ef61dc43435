#include "ffi/backends/nccl/nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/run_steps.h"
#include "ffi/flight_dump.h"

namespace jaxcomm {
namespace {

// What a communicator that is closed grants to operations on their way.
constexpr double kGraceSeconds = 10;

// What operations on their way are granted when a process of theirs has ended.
constexpr auto kLastWords = std::chrono::milliseconds(20);
// How much earlier than the system NCCL may learn of that, on a machine that is busy.
constexpr auto kHeadStart = std::chrono::milliseconds(500);

constexpr char kAfterAbort[] =
    ". The communicator was aborted, and what ran has no result: call "
    "jaxcomm.finalize() in every process, then jaxcomm.init()";

void KeepForever(std::shared_ptr<NcclWorld> world) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<NcclWorld>>;
  std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(std::move(world));
}

}  // namespace

NcclCommunicator::NcclCommunicator(CommunicatorSpec spec, NcclSpec how)
    : Communicator(std::move(spec)),
      how_(std::move(how)),
      library_(how_.world->library()),
      number_(NextCommunicatorNumber()) {}

NcclCommunicator::~NcclCommunicator() {
  for (auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->context);
    rank->windows.RemoveAll(library_, rank->comm);
  }
  // A graph that XLA keeps with a compiled program refers to what is freed below, and
  // NCCL would wait for the end of the graph. So would the world, whose child it is.
  for (auto& rank : ranks_) {
    if (!rank->in_flight.was_captured()) continue;
    KeepForever(how_.world);
    return;
  }
  if (one_shot_ != nullptr) one_shot_->Leave();
  std::vector<nccl::Comm> comms;
  for (auto& rank : ranks_) comms.push_back(rank->comm.exchange(nullptr));
  EndComms(library_, comms, /*abort=*/false);
  for (auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->context);
    rank->in_flight.Release();
    for (auto& [result, event] : rank->begun) rank->spare_events.push_back(event);
    for (cuda::Event event : rank->spare_events) library_.cuda.EventDestroy(event);
    if (rank->stream != nullptr) library_.cuda.StreamDestroy(rank->stream);
    if (rank->scratch != 0) library_.cuda.MemFree(rank->scratch);
  }
}

Status NcclCommunicator::Make() {
  if (Status status = MakeRanks(); status.failure()) return status;
  if (Status status = MakeShortcuts(); status.failure()) return status;
  const Held before = MeasureHeld();
  if (Status status = SplitOff(); status.failure()) return status;
  if (Status status = WarmUp(); status.failure()) return status;
  const Held after = MeasureHeld();
  device_bytes_ = after.is_told ? after.told - before.told
                                : std::max<int64_t>(0, after.used - before.used);
  if (one_shot_ != nullptr) device_bytes_ += one_shot_->device_bytes();
  return OkStatus();
}

void NcclCommunicator::Abort(const Status& reason) {
  const KeptContext kept(library_.cuda);
  const auto end =
      Clock::now() + Seconds(std::min(kGraceSeconds, spec().timeout_seconds));
  while (!failed() && Poll() && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Fail(reason, /*by_force=*/false);
  Abandon();
  // Not the watch is to bury it.
  Unwatch(*this);
}

int64_t NcclCommunicator::DeviceBytesNow() const {
  // What those that share have NCCL tells together.
  if (shares_memory() || failed()) return device_bytes_;
  int64_t told = one_shot_ == nullptr ? 0 : one_shot_->device_bytes();
  for (const auto& rank : ranks_) {
    // Held, nobody ends it meanwhile.
    std::unique_lock<std::timed_mutex> launching(rank->launching, std::try_to_lock);
    if (!launching || rank->comm == nullptr ||
        !ToldDeviceBytes(library_, rank->comm, nccl::MemStat::kTotal, &told)) {
      return device_bytes_;
    }
  }
  return told;
}

CommunicatorStats NcclCommunicator::stats() const {
  CommunicatorStats stats;
  for (const auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->context);
    rank->in_flight.Refresh();
    if (copies_ != nullptr) copies_->in_flight(rank->place).Refresh();
    stats.bytes += rank->counts.bytes();
  }
  ranks_[0]->counts.Tell(&stats);
  stats.one_shot = one_shot_ == nullptr          ? "no: not asked for"
                   : one_shot_->reason().empty() ? "yes"
                                                 : StrCat("no: ", one_shot_->reason());
  stats.device_bytes = DeviceBytesNow();
  stats.is_suspended = is_suspended_;
  if (is_suspended_) {
    stats.device_bytes = one_shot_ == nullptr ? 0 : one_shot_->device_bytes();
    for (const auto& rank : ranks_) {
      ToldDeviceBytes(library_, rank->comm, nccl::MemStat::kPersist,
                      &stats.device_bytes);
    }
  }
  stats.host_bytes = recorder().host_bytes();
  stats.in_flight = InFlightCount();
  return stats;
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
  // It may have ended in order, and what it sent be on its way.
  const Clock::time_point now = Clock::now();
  if (peer_lost_ == Clock::time_point()) peer_lost_ = now;
  if (InFlightCount() > 0 && now - peer_lost_ < kLastWords) return true;
  std::string text = StrCat("the communicator over axes ", spec().axes, " (lane '",
                            spec().lane, "'): ");
  bool is_in_call = false;
  for (auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->context);
    const InFlight::Overdue first = rank->in_flight.First();
    if (!first.found) continue;
    text = Describe(*rank, first);
    is_in_call = true;
    DumpFlightRecords("peer gone");
    break;
  }
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!failed()) failed_between_calls_ = !is_in_call;
  }
  Fail(Status(ErrorCode::kAborted, StrCat(text, lost, " has ended", kAfterAbort)),
       /*by_force=*/true);
  Abandon();
  return true;
}

bool NcclCommunicator::Poll() {
  std::unique_lock<std::mutex> lock(polling_, std::try_to_lock);
  if (!lock) return !failed();  // someone else is at it
  if (failed()) return false;
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
      if (launching && rank->comm != nullptr &&
          library_.nccl.CommGetAsyncError(rank->comm, &state) == nccl::kSuccess &&
          state != nccl::kSuccess && state != nccl::kInProgress) {
        overdue = rank->in_flight.Poll(Clock::now(), Seconds(spec().timeout_seconds));
        overdue.found = true;
        overdue.status = library_.Check(state, "NCCL", rank->comm);
      }
    }
    if (!overdue.found) continue;
    const bool is_late = overdue.status.success();
    if (!is_late && how_.world->has_peers()) {
      // NCCL may be the first to notice that a process has ended; it does not say
      // which.
      if (error_seen_ == Clock::time_point()) error_seen_ = Clock::now();
      if (Clock::now() - error_seen_ < kHeadStart) return true;
    }
    std::string text = Describe(*rank, overdue);
    text += is_late ? DescribeLate(spec()) : overdue.status.message();
    text += kAfterAbort;
    DumpFlightRecords(is_late ? "timeout" : "error");
    Fail(Status(is_late ? ErrorCode::kDeadlineExceeded : ErrorCode::kUnavailable,
                std::move(text)),
         /*by_force=*/true);
    Abandon();
    return false;
  }
  return InFlightCount() > 0;
}

bool NcclCommunicator::IsIdleSoon() {
  const auto end = Clock::now() + kLastWords;
  while (true) {
    for (auto& rank : ranks_) {
      CurrentContext current(library_.cuda, rank->context);
      rank->in_flight.Refresh();
      if (copies_ != nullptr) copies_->in_flight(rank->place).Refresh();
    }
    if (InFlightCount() == 0) return true;
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void NcclCommunicator::AbortComm(const Rank& rank, nccl::Comm comm) {
  if (!rank.in_flight.was_captured()) {
    library_.nccl.CommAbort(comm);
    return;
  }
  // NCCL ends what runs, and then waits here for the end of the graphs that refer to
  // the communicator, which XLA keeps for as long as their programs.
  KeepForever(how_.world);
  std::thread([&library = library_, context = rank.context, comm] {
    CurrentContext current(library.cuda, context);
    library.nccl.CommAbort(comm);
  }).detach();
}

void NcclCommunicator::Fail(const Status& reason, bool by_force) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failed()) return;
    failure_ = reason;
    failed_.store(true, std::memory_order_release);
  }
  std::vector<std::unique_lock<std::timed_mutex>> locks;
  // Whoever holds one waits for a peer, and sees failed(); or is stuck in NCCL. By the
  // system's clock: ThreadSanitizer does not see locks by another.
  const auto end = std::chrono::system_clock::now() + std::chrono::seconds(1);
  for (auto& rank : ranks_) locks.emplace_back(rank->launching, end);
  // A rank may just have been given what another will refuse, or be stuck in NCCL.
  const bool has_all = std::all_of(locks.begin(), locks.end(),
                                   [](const auto& lock) { return lock.owns_lock(); });
  if (!by_force && has_all && IsIdleSoon()) {
    if (copies_ != nullptr) copies_->Fail(reason);
    return;
  }
  how_.world->SetBroken();
  if (one_shot_ != nullptr) one_shot_->Stop();
  for (auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->context);
    if (const nccl::Comm comm = rank->comm.exchange(nullptr)) AbortComm(*rank, comm);
    rank->in_flight.Fail();
    if (copies_ != nullptr) copies_->in_flight(rank->place).Fail();
  }
  // Last: a rank may hold its lock while it gives something to a stream that has been
  // given too much, behind what hung until now.
  if (copies_ != nullptr) copies_->Fail(reason);
}

Status MakeNcclCommunicator(CommunicatorSpec spec, NcclSpec how,
                            std::shared_ptr<Communicator>* communicator) {
  const NcclLibrary& library = how.world->library();
  const KeptContext kept(library.cuda);
  if (const std::string field = how.settings.Unknown(library); !field.empty()) {
    return InvalidArgument("NCCL ", library.VersionText(), " has no setting '", field,
                           "'; leave it out or install a newer NCCL");
  }
  auto made = std::make_shared<NcclCommunicator>(std::move(spec), std::move(how));
  if (Status status = made->Make(); status.failure()) {
    return WithCircumstances(library, status, made->any_context());
  }
  Watch(made);
  *communicator = std::move(made);
  return OkStatus();
}

}  // namespace jaxcomm
