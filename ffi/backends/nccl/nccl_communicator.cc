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
#include "ffi/flight/flight_dump.h"

namespace jaxcomm {
namespace {

// What a communicator that is closed grants to operations on their way.
constexpr double kGraceSeconds = 10;

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
  const bool is_over = DevicesAreStopped();
  for (auto& rank : ranks_) {
    if (is_over) break;
    CurrentContext current(library_.cuda, rank->context);
    rank->windows.RemoveAll(library_, rank->comm);
  }
  // A graph that XLA keeps with a compiled program refers to what is freed below, and
  // NCCL would wait for the end of the graph. So would the world, whose child it is.
  if (was_captured()) {
    KeepForever(how_.world);
    return;
  }
  if (one_shot_ != nullptr) one_shot_->Leave();
  std::vector<nccl::Comm> comms;
  for (auto& rank : ranks_) comms.push_back(rank->comm.exchange(nullptr));
  EndComms(library_, comms, is_broken_);
  for (auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->context);
    rank->in_flight.Release();
    for (auto& [result, event] : rank->begun) rank->spare_events.push_back(event);
    for (cuda::Event event : rank->spare_events) library_.cuda.EventDestroy(event);
    if (rank->stream != nullptr) library_.cuda.StreamDestroy(rank->stream);
    if (rank->scratch != 0) library_.cuda.MemFree(rank->scratch);
    if (rank->call_cards_on_device != 0) {
      library_.cuda.MemFree(rank->call_cards_on_device);
    }
    if (rank->call_cards != nullptr) library_.cuda.MemFreeHost(rank->call_cards);
  }
  // Nothing reads it any more.
  if (poisoned_ != nullptr) library_.cuda.MemFreeHost(poisoned_);
}

Status NcclCommunicator::Make() {
  if (Status status = MakeRanks(); status.failure()) return status;
  if (Status status = MakeShortcuts(); status.failure()) return status;
  if (Status status = MakeCallCards(); status.failure()) return status;
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
  // What is on its way does not end by itself. Else nothing failed.
  if (!failed() && has_work()) {
    // A process that ends by itself, and closes what it has, keeps its status.
    const bool exits = how_.on_failure == OnFailure::kExit;
    Fail(reason, /*names=*/true, /*dump=*/nullptr,
         exits ? OnFailure::kRaise : how_.on_failure);
  } else {
    Refuse(reason, /*names=*/true);
    if (copies_ != nullptr) copies_->Fail(reason);
  }
  Abandon();
  // Unregister here, so that the last reference, and with it the slow destructor, is
  // released on this thread and not on the watch's.
  Unwatch(*this);
}

int64_t NcclCommunicator::DeviceBytesNow() const {
  // NCCL accounts for communicators that share resources as one.
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
  if (is_suspended_ && !failed()) {
    stats.device_bytes = one_shot_ == nullptr ? 0 : one_shot_->device_bytes();
    for (const auto& rank : ranks_) {
      // An abort takes the lock as well: the communicator stays while it is held.
      std::unique_lock<std::timed_mutex> launching(rank->launching, std::try_to_lock);
      if (!launching) continue;
      ToldDeviceBytes(library_, rank->comm, nccl::MemStat::kPersist,
                      &stats.device_bytes);
    }
  }
  stats.host_bytes = recorder().host_bytes();
  stats.in_flight = InFlightCount();
  return stats;
}

xla::ffi::Future NcclCommunicator::Execute(const Call& call) {
  const TestDouble* const test_double = library_.test_double;
  const auto found = std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
    return rank->device == call.device_id;
  });
  if (test_double == nullptr || found == ranks_.end()) {
    return FailedFuture(NotMine(call));
  }
  struct Waiting {
    std::shared_ptr<NcclCommunicator> communicator;
    xla::ffi::Promise promise;
    std::vector<const void*> operands;
    std::vector<void*> results;
    Call call;
    Rank* rank = nullptr;

    void Complete(const Status& status) {
      status.success() ? promise.SetAvailable() : promise.SetError(status);
      delete this;
    }
    void Issue() {
      NcclCommunicator& self = *communicator;
      Status status = OkStatus();
      // A double issues the calls of several devices one after the other.
      if (rank->call_cards != nullptr && self.ranks_.size() == 1) {
        status = self.CompareCalls(call, *rank);
      }
      if (status.success()) status = self.Launch(call, *rank, rank->stream);
      if (status.failure()) return Complete(status);
      const auto done = [](void* waiting, int error) {
        auto* const self = static_cast<Waiting*>(waiting);
        self->Complete(self->communicator->library_.Check(
            static_cast<cuda::Result>(error), "waiting for the stream"));
      };
      self.library_.test_double->when_done(rank->stream, done, this);
    }
  };
  auto* const waiting = new Waiting;
  waiting->communicator =
      std::static_pointer_cast<NcclCommunicator>(Watched::shared_from_this());
  waiting->rank = found->get();
  waiting->operands.assign(call.operands, call.operands + call.site->operands().size());
  waiting->results.assign(call.results, call.results + call.site->results().size());
  waiting->call = call;
  waiting->call.operands = waiting->operands.data();
  waiting->call.results = waiting->results.data();
  xla::ffi::Future future(waiting->promise);
  test_double->arrive(
      how_.world.get(), waiting->rank->place, this, call.run_id, call.site->serial(),
      [](void* argument) { static_cast<Waiting*>(argument)->Issue(); }, waiting);
  if (failed()) Abandon();
  return future;
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
  RETURN_IF_ERROR(made->BeWatched());
  *communicator = std::move(made);
  return OkStatus();
}

}  // namespace jaxcomm
