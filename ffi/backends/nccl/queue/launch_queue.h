// The calls of one rank of this process: gives them to streams, counts and records
// them, and knows how far the device is.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_LAUNCH_QUEUE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_LAUNCH_QUEUE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

#include "ffi/backends/nccl/failure/health.h"
#include "ffi/backends/nccl/library/rank_facts.h"
#include "ffi/backends/nccl/queue/in_flight.h"
#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/core/watchdog.h"
#include "ffi/flight/flight_recorder.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

// How often a rank was called, and for how much. On cache lines of its own: ranks call
// at the same time, each on a thread of its own.
class alignas(64) CallCounts {
 public:
  enum class Kind { kOrdinary, kSymmetric, kCopied, kOneShot, kDeviceSized };

  void Add(const CallSite& site, Kind kind = Kind::kOrdinary) {
    Increase(calls_[static_cast<int>(site.kind())], 1);
    Increase(bytes_, site.operand_bytes());
    Increase(of_kind_[static_cast<int>(kind)], 1);
  }

  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  int64_t of(Kind kind) const {
    return of_kind_[static_cast<int>(kind)].load(std::memory_order_relaxed);
  }

  // Adds the calls of each collective to the stats of a communicator.
  void AddTo(CommunicatorStats* stats) const {
    for (int i = 0; i < Plan::kKinds; ++i) {
      const int64_t count = calls_[i].load(std::memory_order_relaxed);
      if (count > 0) stats->calls.emplace_back(KindName(Plan::Kind(i)), count);
    }
  }

 private:
  static void Increase(std::atomic<int64_t>& count, int64_t by) {
    count.fetch_add(by, std::memory_order_relaxed);
  }

  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> calls_[Plan::kKinds] = {};
  std::atomic<int64_t> of_kind_[5] = {};
};

class LaunchQueue {
 public:
  // Counts a thread of a call while this lives.
  class Counted {
   public:
    explicit Counted(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
    ~Counted() { count_.fetch_sub(1); }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

   private:
    std::atomic<int>& count_;
  };

  LaunchQueue(const NcclLibrary& library, const RankFacts& facts,
              FlightRecorder& recorder, Health& health)
      : library_(library),
        facts_(facts),
        recorder_(recorder),
        health_(health),
        in_flight_(library, recorder) {}

  // Makes and frees the events. Requires the device's context.
  Status Prepare() { return in_flight_.Prepare(); }
  void Release() { in_flight_.Release(); }
  // Follows what an engine gives to streams by itself, too.
  void Follow(InFlight& more) { more_ = &more; }

  // Writes a call into the flight record. Give() numbers it, unless the caller takes
  // the next number.
  InFlight::Named Record(const Call& call) {
    return {recorder_.Start(call.site->operation(), call.run_id, call.tag, facts_.group,
                            facts_.rank),
            call.site->operation(), 0};
  }
  // Writes a call that nobody can do into the flight record.
  void Refuse(const Call& call) {
    recorder_.Finish(Record(call).ticket, FlightRecorder::State::kFailed);
  }
  uint64_t NextNumber() { return ++operations_; }
  // Records that a call failed, and returns its error.
  Status Failed(const Call& call, const InFlight::Named& named, const Status& status) {
    recorder_.Finish(named.ticket, FlightRecorder::State::kFailed);
    return health_.FailCall(call, facts_, status);
  }

  // Has give() give `stream` an operation, and the watch follow it. Fails if the
  // communicator takes no calls; ends it if give() fails for more than this call.
  // give() calls MayWait() once `stream` may wait for other ranks: if it fails later,
  // what it gave is in flight all the same.
  // `told`: of an operation that is not captured and tells how far it is, set by
  // give(); null: events say that.
  template <typename GiveTo>
  Status Give(const Call& call, cuda::Stream stream, InFlight::Named named,
              const GiveTo& give, const InFlight::Told* told = nullptr) {
    // If what follows fails, the operation is in flight all the same: a failure that
    // took the rank for idle would leave its stream waiting for the other ranks.
    std::optional<Counted> given;
    const Status status = Launch(call, named.sequence, [&]() -> Status {
      may_wait_ = false;
      if (told == nullptr) {
        RETURN_IF_ERROR(
            in_flight_.Begin(stream, call.may_be_captured, InFlight::Clock::now()));
      }
      if (Status refused = give(); refused.failure()) {
        if (may_wait_ && !FollowPart(call, stream, named, told != nullptr)) {
          given.emplace(giving);
        }
        return refused;
      }
      given.emplace(giving);
      RETURN_IF_ERROR(health_.GivePoison(call, facts_, stream));
      if (named.sequence == 0) named.sequence = NextNumber();
      if (told == nullptr) {
        RETURN_IF_ERROR(in_flight_.End(stream, named, InFlight::Clock::now()));
      } else {
        RETURN_IF_ERROR(in_flight_.Add(stream, named, *told));
      }
      return OkStatus();
    });
    return status.success() ? status : Failed(call, named, status);
  }

  void MayWait() { may_wait_ = true; }

  // Has work() use NCCL for a call, as the only thread of the rank, and the watch look
  // at it: NCCL may keep the thread for as long as a rank does not come. Fails if the
  // communicator takes no calls. `number`: of the operation; 0: the next.
  template <typename Work>
  Status Launch(const Call& call, uint64_t number, const Work& work) {
    const Counted counted(giving);
    WakeWatchdog();
    MutexLock lock(launching);
    RETURN_IF_ERROR(health_.Refusal());
    CurrentContext current(library_.cuda, facts_.context);
    launched_operation_.store(call.site->operation(), std::memory_order_relaxed);
    launched_number_.store(number != 0 ? number : operations_.load() + 1,
                           std::memory_order_relaxed);
    launched_since_.store(InFlight::Clock::now().time_since_epoch().count(),
                          std::memory_order_release);
    Status status = work();
    launched_since_.store(0, std::memory_order_release);
    return status;
  }

  // See InFlight.
  void Refresh() {
    CurrentContext current(library_.cuda, facts_.context);
    in_flight_.Refresh();
    if (more_ != nullptr) more_->Refresh();
  }
  InFlight::Overdue Poll(std::chrono::duration<double> patience) {
    CurrentContext current(library_.cuda, facts_.context);
    const auto now = InFlight::Clock::now();
    InFlight::Overdue overdue = in_flight_.Poll(now, patience);
    // Not found, it names the first operation all the same.
    const auto or_else = [&overdue](const InFlight::Overdue& other) {
      if (!overdue.found && other.found) overdue = other;
    };
    if (more_ != nullptr) or_else(more_->Poll(now, patience));
    or_else(LaunchedFor(patience, now));
    return overdue;
  }
  InFlight::Overdue First() {
    CurrentContext current(library_.cuda, facts_.context);
    InFlight::Overdue first = in_flight_.First();
    if (!first.found && more_ != nullptr) first = more_->First();
    return first.found ? first : LaunchedFor({}, InFlight::Clock::now());
  }
  void Fail() {
    in_flight_.Fail();
    if (more_ != nullptr) more_->Fail();
  }

  // Operations that streams have, and those in flight: also calls that wait for other
  // ranks, to give each other's streams something.
  int given() const { return in_flight_.size(); }
  int64_t size() const {
    return waiting.load() + given() + (more_ ? more_->size() : 0);
  }
  // The number of the last operation that a stream was given, or that a thread gives
  // it.
  uint64_t reached() const {
    const uint64_t given = operations_.load();
    return launches() > 0 ? std::max(given, launched_number_.load()) : given;
  }
  // Those that a thread is giving a stream: 1 or 0.
  int launches() const { return launched_since_.load() != 0; }
  bool was_captured() const { return in_flight_.was_captured(); }

  InFlight& in_flight() { return in_flight_; }
  CallCounts& counts() { return counts_; }
  const CallCounts& counts() const { return counts_; }

  // Held while the communicator is given work: NCCL wants one thread at a time.
  TimedMutex launching;
  // Threads that give a stream an operation, from before they know that nothing failed:
  // whatever fails meanwhile takes theirs for an operation in flight.
  std::atomic<int> giving{0};
  // Threads that may wait for other ranks.
  std::atomic<int> waiting{0};

 private:
  // Has the watch follow what `stream` was given of a call that fails. Returns whether
  // it can.
  bool FollowPart(const Call& call, cuda::Stream stream, InFlight::Named named,
                  bool begins) {
    recorder_.Finish(named.ticket, FlightRecorder::State::kFailed);
    if (named.sequence == 0) named.sequence = NextNumber();
    const auto now = InFlight::Clock::now();
    return (!begins || in_flight_.Begin(stream, call.may_be_captured, now).success()) &&
           in_flight_.End(stream, named, now).success();
  }

  // The operation that a thread has been launching for longer than `patience`.
  InFlight::Overdue LaunchedFor(std::chrono::duration<double> patience,
                                InFlight::Clock::time_point now) const {
    const auto since = launched_since_.load();
    const InFlight::Overdue launched{true, launched_operation_.load(),
                                     launched_number_.load()};
    // Another thread may have begun meanwhile.
    if (since == 0 || launched_since_.load() != since) return {};
    return now.time_since_epoch() - InFlight::Clock::duration(since) > patience
               ? launched
               : InFlight::Overdue();
  }

  const NcclLibrary& library_;
  const RankFacts& facts_;
  FlightRecorder& recorder_;
  Health& health_;
  InFlight in_flight_;
  InFlight* more_ = nullptr;
  std::atomic<uint64_t> operations_{0};
  // What Launch() is at, and since when; 0: nothing.
  std::atomic<InFlight::Clock::rep> launched_since_{0};
  std::atomic<uint64_t> launched_number_{0};
  std::atomic<uint32_t> launched_operation_{0};
  bool may_wait_ = false;  // under `launching`
  CallCounts counts_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_QUEUE_LAUNCH_QUEUE_H_
