#include "ffi/backends/nccl/nccl_communicator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/host/continuer.h"
#include "ffi/backends/nccl/in_flight.h"
#include "ffi/backends/nccl/steps.h"
#include "ffi/backends/nccl/watch.h"
#include "ffi/flight_dump.h"
#include "ffi/handlers/collectives.h"
#include "ffi/operation_table.h"

namespace jaxcomm {
namespace {

using Clock = InFlight::Clock;

constexpr size_t kScratchBytes = 4096;
// What a communicator that is closed grants to operations on their way.
constexpr double kGraceSeconds = 10;

std::atomic<uint64_t> next_number{1};

Clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds));
}

class NcclCommunicator final : public Communicator, public Watched {
 public:
  NcclCommunicator(CommunicatorSpec spec, NcclSpec how)
      : Communicator(std::move(spec)),
        how_(std::move(how)),
        library_(how_.world->library()),
        number_(next_number.fetch_add(1)) {}

  ~NcclCommunicator() override {
    // A graph that XLA keeps with a compiled program refers to the communicator: NCCL
    // would wait for the end of the graph. So would the world, whose child it is.
    for (auto& rank : ranks_) {
      if (!rank->in_flight.was_captured() || rank->comm == nullptr) continue;
      new std::shared_ptr<NcclWorld>(how_.world);
      return;
    }
    std::vector<nccl::Comm> comms;
    for (auto& rank : ranks_) comms.push_back(std::exchange(rank->comm, nullptr));
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

  cuda::Context any_context() const { return how_.world->context(0); }

  Status Make() {
    if (Status status = MakeRanks(); status.failure()) return status;
    if (Status status = SplitOff(); status.failure()) return status;
    return WarmUp();
  }

  Status Enqueue(const Call& call, void* stream) override {
    Rank* const rank = ByOrdinal(call.device_id);
    return rank == nullptr ? NotMine(call) : Launch(call, *rank, stream);
  }

  Status EnqueueStart(const Call& call, void* stream) override;
  Status EnqueueDone(const Call& call, void* stream) override;

  xla::ffi::Future Execute(const Call& call) override;

  void Abort(const Status& reason) override {
    const auto end =
        Clock::now() + Seconds(std::min(kGraceSeconds, spec().timeout_seconds));
    while (!failed() && Poll() && Clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    Fail(reason, /*by_force=*/InFlightCount() > 0);
    Abandon();
  }

  CommunicatorStats stats() const override {
    CommunicatorStats stats;
    for (const auto& rank : ranks_) {
      CurrentContext current(library_.cuda, rank->context);
      rank->in_flight.Refresh();
    }
    stats.bytes = bytes_.load(std::memory_order_relaxed);
    stats.device_bytes = device_bytes_;
    stats.host_bytes = recorder().host_bytes();
    stats.in_flight = InFlightCount();
    for (int i = 0; i < kNumCollectives; ++i) {
      const int64_t count = calls_[i].load(std::memory_order_relaxed);
      if (count > 0) stats.calls.emplace_back(kCollectives[i].name, count);
    }
    return stats;
  }

  // Watched:
  bool Poll() override;

 private:
  struct Rank {
    Rank(const NcclLibrary& library, FlightRecorder& recorder)
        : in_flight(library, recorder) {}

    int group = 0, rank = 0, size = 0;
    size_t place = 0;    // among the local devices
    int64_t device = 0;  // global id
    int ordinal = 0;
    cuda::Context context = nullptr;
    nccl::Comm comm = nullptr;  // null in a group of one, and after a failure
    cuda::Stream stream = nullptr;
    cuda::Pointer scratch = 0;
    // Collectives begun and not ended, by their first result; and events of those that
    // are, to be used again.
    std::mutex halves_mutex;
    std::vector<std::pair<const void*, cuda::Event>> begun;
    std::vector<cuda::Event> spare_events;
    // Held while the communicator is given work: NCCL wants one thread at a time.
    std::timed_mutex launching;
    InFlight in_flight;
  };

  Status MakeRanks();
  Status SplitOff();
  Status WarmUp();
  Status Launch(const Call& call, Rank& rank, cuda::Stream stream);
  Status Run(const Steps& steps, const Call& call, Rank& rank, cuda::Stream stream);
  Status RunStep(const Step& step, const Call& call, Rank& rank, cuda::Stream stream);
  Status GetSteps(const Call& call, const Rank& rank, std::shared_ptr<const Steps>*);
  Status Barrier(Rank& rank, cuda::Stream stream);
  Status Settle(nccl::Result result, Rank& rank, const char* what);
  void Fail(const Status& reason, bool by_force);
  // Lets calls that were held back see the failure.
  void Abandon() { how_.world->host_order().Abandon(this); }

  int64_t InFlightCount() const {
    int64_t count = 0;
    for (const auto& rank : ranks_) count += rank->in_flight.size();
    return count;
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status failure() const {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    return failure_;
  }
  Rank* ByOrdinal(int64_t ordinal) {
    for (auto& rank : ranks_) {
      if (rank->ordinal == ordinal) return rank.get();
    }
    return nullptr;
  }
  Status NotMine(const Call& call) const {
    return FailedPrecondition(call.site->description(), ": device ", call.device_id,
                              " is not in the communicator it was compiled for");
  }

  const NcclSpec how_;
  const NcclLibrary& library_;
  const uint64_t number_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // of this process
  int64_t device_bytes_ = 0;

  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> calls_[kNumCollectives] = {};
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  Status failure_ = OkStatus();
};

Status NcclCommunicator::MakeRanks() {
  const auto& devices = how_.world->devices();
  for (size_t i = 0; i < devices.size(); ++i) {
    auto made = std::make_unique<Rank>(library_, recorder());
    made->place = i;
    made->device = devices[i].id;
    made->ordinal = devices[i].ordinal;
    made->context = how_.world->context(i);
    for (size_t group = 0; group < spec().groups.size(); ++group) {
      const auto& of = spec().groups[group];
      const auto found = std::find(of.begin(), of.end(), devices[i].id);
      if (found == of.end()) continue;
      made->group = static_cast<int>(group);
      made->rank = static_cast<int>(found - of.begin());
      made->size = static_cast<int>(of.size());
    }
    if (made->size == 0) {
      return InvalidArgument("device ", devices[i].id, " is in no group of axes ",
                             spec().axes);
    }
    CurrentContext current(library_.cuda, made->context);
    if (Status status = library_.Check(library_.cuda.StreamCreateWithPriority(
                                           &made->stream, cuda::kStreamNonBlocking, -1),
                                       "cuStreamCreateWithPriority");
        status.failure()) {
      return status;
    }
    if (Status status = library_.Check(
            library_.cuda.MemAlloc(&made->scratch, kScratchBytes), "cuMemAlloc");
        status.failure()) {
      return status;
    }
    if (Status status = made->in_flight.Prepare(); status.failure()) return status;
    ranks_.push_back(std::move(made));
  }
  return OkStatus();
}

Status NcclCommunicator::SplitOff() {
  std::vector<int> colors, keys;
  int64_t free_before = 0;
  for (const auto& rank : ranks_) {
    // A communicator of one rank would cost memory and do nothing.
    colors.push_back(rank->size > 1 ? rank->group : nccl::kNoColor);
    keys.push_back(rank->rank);
    free_before += FreeDeviceBytes(library_, rank->context);
  }
  std::vector<nccl::Comm> comms;
  if (Status status =
          how_.world->Split(colors, keys, how_.settings, how_.patience, &comms);
      status.failure()) {
    return status;
  }
  int64_t told = 0;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    ranks_[i]->comm = comms[i];
    free_before -= FreeDeviceBytes(library_, ranks_[i]->context);
    uint64_t bytes = 0;
    if (comms[i] != nullptr && library_.nccl.CommMemStats != nullptr &&
        library_.nccl.CommMemStats(comms[i], nccl::MemStat::kTotal, &bytes) ==
            nccl::kSuccess) {
      told += static_cast<int64_t>(bytes);
    }
  }
  device_bytes_ = told > 0 ? told : std::max<int64_t>(0, free_before);
  return OkStatus();
}

// Connects neighbors of the ring, and returns once all ranks did: a rank that allocates
// while the kernel of another waits for it may wait for that kernel.
Status NcclCommunicator::WarmUp() {
  const auto in_group = [&](auto&& call) {
    Status status = OkStatus();
    library_.nccl.GroupStart();
    for (auto& rank : ranks_) {
      if (rank->comm == nullptr || status.failure()) continue;
      CurrentContext current(library_.cuda, rank->context);
      status = library_.Check(call(*rank), "first use", rank->comm);
    }
    Status ended = library_.Check(library_.nccl.GroupEnd(), "first use");
    if (status.success()) status = std::move(ended);
    std::vector<nccl::Comm> comms;
    for (auto& rank : ranks_) comms.push_back(rank->comm);
    if (status.success()) {
      status = WaitUntilReady(library_, comms, how_.patience, "first use");
    }
    return status;
  };
  Status status = in_group([&](Rank& rank) {
    void* bytes = reinterpret_cast<void*>(rank.scratch);
    void* more = reinterpret_cast<void*>(rank.scratch + 64);
    const int next = (rank.rank + 1) % rank.size;
    const int last = (rank.rank + rank.size - 1) % rank.size;
    library_.nccl.Send(bytes, 4, nccl::Type::kInt8, next, rank.comm, rank.stream);
    return library_.nccl.Recv(more, 4, nccl::Type::kInt8, last, rank.comm, rank.stream);
  });
  if (status.success()) {
    status = in_group([&](Rank& rank) {
      void* bytes = reinterpret_cast<void*>(rank.scratch);
      return library_.nccl.AllReduce(bytes, bytes, 1, nccl::Type::kFloat32,
                                     nccl::RedOp::kSum, rank.comm, rank.stream);
    });
  }
  const auto end = Clock::now() + Seconds(how_.patience.seconds);
  for (auto& rank : ranks_) {
    while (status.success()) {
      CurrentContext current(library_.cuda, rank->context);
      const cuda::Result result = library_.cuda.StreamQuery(rank->stream);
      if (result == cuda::kSuccess) break;
      if (result != cuda::kNotReady) {
        status = library_.Check(result, "first use");
      } else if (how_.patience.interrupted()) {
        status = Status(ErrorCode::kCancelled, "interrupted");
      } else if (Clock::now() > end) {
        status = Status(ErrorCode::kDeadlineExceeded,
                        StrCat("the first use of the communicator over axes ",
                               spec().axes, " (lane '", spec().lane,
                               "') is not done after ", how_.patience.seconds, " s"));
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
  }
  if (status.failure()) Fail(status, /*by_force=*/true);
  return status;
}

Status NcclCommunicator::GetSteps(const Call& call, const Rank& rank,
                                  std::shared_ptr<const Steps>* steps) {
  Status status = OkStatus();
  const uint64_t place = number_ << 40 | static_cast<uint64_t>(rank.rank) << 20 |
                         static_cast<uint64_t>(rank.size);
  const auto make = [&]() -> std::shared_ptr<const void> {
    Plan plan;
    auto made = std::make_shared<Steps>();
    status = call.site->MakePlan(rank.size, nullptr, &plan);
    if (status.success()) {
      status = MakeSteps(*call.site, plan, rank.size, rank.rank,
                         library_.nccl.AlltoAll != nullptr, made.get());
    }
    return status.success() ? made : nullptr;
  };
  // By reference: a copy would be allocated, for every call.
  *steps =
      std::static_pointer_cast<const Steps>(call.site->Derived(place, std::cref(make)));
  if (*steps == nullptr && status.success()) {
    status = InvalidArgument(call.site->description(), ": NCCL cannot do this");
  }
  return status;
}

Status NcclCommunicator::Settle(nccl::Result result, Rank& rank, const char* what) {
  if (result == nccl::kSuccess) return OkStatus();
  if (result != nccl::kInProgress) return library_.Check(result, what, rank.comm);
  // NCCL connects to a rank at the first use, which needs that rank's process.
  NcclPatience patience;
  patience.seconds = spec().timeout_seconds;
  patience.interrupted = [this] { return failed(); };
  return WaitUntilReady(library_, {rank.comm}, patience, what);
}

Status NcclCommunicator::Barrier(Rank& rank, cuda::Stream stream) {
  void* bytes = reinterpret_cast<void*>(rank.scratch);
  return Settle(library_.nccl.AllReduce(bytes, bytes, 1, nccl::Type::kFloat32,
                                        nccl::RedOp::kSum, rank.comm, stream),
                rank, "ncclAllReduce");
}

Status NcclCommunicator::RunStep(const Step& step, const Call& call, Rank& rank,
                                 cuda::Stream stream) {
  const char* from = static_cast<const char*>(call.operands[step.leaf]) + step.from;
  char* to = static_cast<char*>(call.results[step.leaf]) + step.to;
  const nccl::Api& api = library_.nccl;
  switch (step.kind) {
    case Step::Kind::kCopy:
      if (from == to) return OkStatus();
      return library_.Check(
          library_.cuda.MemcpyDtoDAsync(reinterpret_cast<cuda::Pointer>(to),
                                        reinterpret_cast<cuda::Pointer>(from),
                                        step.count, stream),
          "cuMemcpyDtoDAsync");
    case Step::Kind::kZero:
      return library_.Check(
          library_.cuda.MemsetD8Async(reinterpret_cast<cuda::Pointer>(to), 0,
                                      step.count, stream),
          "cuMemsetD8Async");
    case Step::Kind::kSend:
      return Settle(api.Send(from, step.count, step.type, step.peer, rank.comm, stream),
                    rank, "ncclSend");
    case Step::Kind::kRecv:
      return Settle(api.Recv(to, step.count, step.type, step.peer, rank.comm, stream),
                    rank, "ncclRecv");
    case Step::Kind::kAllReduce:
      return Settle(
          api.AllReduce(from, to, step.count, step.type, step.op, rank.comm, stream),
          rank, "ncclAllReduce");
    case Step::Kind::kReduce:
      return Settle(api.Reduce(from, to, step.count, step.type, step.op, step.peer,
                               rank.comm, stream),
                    rank, "ncclReduce");
    case Step::Kind::kReduceScatter:
      return Settle(api.ReduceScatter(from, to, step.count, step.type, step.op,
                                      rank.comm, stream),
                    rank, "ncclReduceScatter");
    case Step::Kind::kAllGather:
      return Settle(api.AllGather(from, to, step.count, step.type, rank.comm, stream),
                    rank, "ncclAllGather");
    case Step::Kind::kAllToAll:
      return Settle(api.AlltoAll(from, to, step.count, step.type, rank.comm, stream),
                    rank, "ncclAlltoAll");
    case Step::Kind::kBroadcast:
      return Settle(
          api.Broadcast(from, to, step.count, step.type, step.peer, rank.comm, stream),
          rank, "ncclBroadcast");
  }
  return OkStatus();
}

Status NcclCommunicator::Run(const Steps& steps, const Call& call, Rank& rank,
                             cuda::Stream stream) {
  Status status = OkStatus();
  for (const Step& step : steps.local) {
    if (status.success()) status = RunStep(step, call, rank, stream);
  }
  if (status.failure() || steps.grouped.empty()) return status;
  if (rank.comm == nullptr) return failure();
  if (steps.grouped.size() == 1) {
    return RunStep(steps.grouped[0], call, rank, stream);
  }
  status = library_.Check(library_.nccl.GroupStart(), "ncclGroupStart");
  if (status.failure()) return status;
  for (const Step& step : steps.grouped) {
    if (status.success()) status = RunStep(step, call, rank, stream);
  }
  Status ended = Settle(library_.nccl.GroupEnd(), rank, "ncclGroupEnd");
  return status.failure() ? status : ended;
}

Status NcclCommunicator::Launch(const Call& call, Rank& rank, cuda::Stream stream) {
  std::shared_ptr<const Steps> steps;
  if (Status status = GetSteps(call, rank, &steps); status.failure()) return status;
  const FlightRecorder::Ticket ticket =
      recorder().Start(*call.site, call.run_id, call.tag, rank.group, rank.rank);
  Status status = OkStatus();
  {
    std::lock_guard<std::timed_mutex> lock(rank.launching);
    if (failed()) {
      status = failure();
    } else {
      CurrentContext current(library_.cuda, rank.context);
      rank.in_flight.Begin(stream);
      const bool is_barrier = call.site->attributes().collective == "barrier";
      status = is_barrier && rank.size > 1 ? Barrier(rank, stream)
                                           : Run(*steps, call, rank, stream);
      if (status.success()) {
        rank.in_flight.End(stream, ticket, call.site->operation());
      }
    }
  }
  if (status.failure()) {
    recorder().Finish(ticket, FlightRecorder::State::kFailed);
    if (!failed()) {
      status = Status(ErrorCode::kInternal,
                      StrCat(call.site->description(), " (lane '", spec().lane,
                             "'): ", status.message(),
                             ". The communicator has ended: call jaxcomm.finalize() "
                             "in every process, then jaxcomm.init()"));
      Fail(status, /*by_force=*/true);
    }
    return status;
  }
  if (&rank == ranks_[0].get()) {
    calls_[call.site->collective_index()].fetch_add(1, std::memory_order_relaxed);
  }
  bytes_.fetch_add(call.site->operand_bytes(), std::memory_order_relaxed);
  WakeWatch();
  return OkStatus();
}

Status NcclCommunicator::EnqueueStart(const Call& call, void* stream) {
  Rank* const rank = ByOrdinal(call.device_id);
  if (rank == nullptr) return NotMine(call);
  CurrentContext current(library_.cuda, rank->context);
  cuda::Event event = nullptr;
  {
    std::lock_guard<std::mutex> lock(rank->halves_mutex);
    // What was begun here before has no end any more: its program failed in between.
    // Results without elements alone may share an address.
    for (size_t i = 0; call.site->results()[0].elements > 0 && i < rank->begun.size();
         ++i) {
      if (rank->begun[i].first != call.results[0]) continue;
      rank->spare_events.push_back(rank->begun[i].second);
      rank->begun.erase(rank->begun.begin() + static_cast<ptrdiff_t>(i--));
    }
    if (!rank->spare_events.empty()) {
      event = rank->spare_events.back();
      rank->spare_events.pop_back();
    }
  }
  Status status = OkStatus();
  if (event == nullptr) {
    status = library_.Check(
        library_.cuda.EventCreate(&event, cuda::kEventDisableTiming), "cuEventCreate");
  }
  // The operands are there once `stream` has come so far, and the results once the
  // rank's own stream has come to the end of the operation.
  if (status.success()) {
    status = library_.Check(library_.cuda.EventRecord(event, stream), "cuEventRecord");
  }
  if (status.success()) {
    status = library_.Check(library_.cuda.StreamWaitEvent(rank->stream, event, 0),
                            "cuStreamWaitEvent");
  }
  if (status.success()) status = Launch(call, *rank, rank->stream);
  if (status.success()) {
    status =
        library_.Check(library_.cuda.EventRecord(event, rank->stream), "cuEventRecord");
  }
  std::lock_guard<std::mutex> lock(rank->halves_mutex);
  if (status.success()) {
    rank->begun.emplace_back(call.results[0], event);
  } else if (event != nullptr) {
    rank->spare_events.push_back(event);
  }
  return status;
}

Status NcclCommunicator::EnqueueDone(const Call& call, void* stream) {
  Rank* const rank = ByOrdinal(call.device_id);
  if (rank == nullptr) return NotMine(call);
  cuda::Event event = nullptr;
  {
    std::lock_guard<std::mutex> lock(rank->halves_mutex);
    for (size_t i = rank->begun.size(); i-- > 0 && event == nullptr;) {
      if (rank->begun[i].first != call.results[0]) continue;
      event = rank->begun[i].second;
      rank->begun.erase(rank->begun.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  if (event == nullptr) {
    return FailedPrecondition(
        call.site->description(),
        ": no collective was begun that gives its result here; XLA may have copied the "
        "buffer in between. Use the function without _start and _done");
  }
  CurrentContext current(library_.cuda, rank->context);
  Status status = library_.Check(library_.cuda.StreamWaitEvent(stream, event, 0),
                                 "cuStreamWaitEvent");
  std::lock_guard<std::mutex> lock(rank->halves_mutex);
  rank->spare_events.push_back(event);
  return status;
}

// For CPU devices, which the stand-in for NCCL serves: on a stream of the rank's own.
xla::ffi::Future NcclCommunicator::Execute(const Call& call) {
  Rank* rank = nullptr;
  for (auto& each : ranks_) {
    if (each->device == call.device_id) rank = each.get();
  }
  if (rank == nullptr) return FailedFuture(NotMine(call));

  struct Waiting {
    std::shared_ptr<NcclCommunicator> communicator;
    xla::ffi::Promise promise;
    Stalls stalls;
    std::vector<const void*> operands;
    std::vector<void*> results;
    Call call;

    void Complete(Status status) {
      std::vector<Continuation> all;
      all.push_back({std::move(promise), std::move(status)});
      Continue(std::move(all), stalls);
      delete this;
    }
  };
  auto* waiting = new Waiting;
  waiting->communicator =
      std::static_pointer_cast<NcclCommunicator>(Watched::shared_from_this());
  waiting->stalls = call.site->stalls();
  waiting->operands.assign(call.operands, call.operands + call.site->operands().size());
  waiting->results.assign(call.results, call.results + call.site->results().size());
  waiting->call = call;
  waiting->call.operands = waiting->operands.data();
  waiting->call.results = waiting->results.data();
  xla::ffi::Future future(waiting->promise);
  const auto issue = [rank, waiting] {
    NcclCommunicator& self = *waiting->communicator;
    if (Status status = self.Launch(waiting->call, *rank, rank->stream);
        status.failure()) {
      waiting->Complete(std::move(status));
      return;
    }
    CurrentContext current(self.library_.cuda, rank->context);
    self.library_.cuda.LaunchHostFunc(
        rank->stream,
        [](void* argument) {
          auto* waiting = static_cast<Waiting*>(argument);
          waiting->Complete(waiting->communicator->failure());
        },
        waiting);
  };
  how_.world->host_order().Arrive(rank->place, this, {call.run_id, call.site->serial()},
                                  issue);
  if (failed()) Abandon();
  return future;
}

bool NcclCommunicator::Poll() {
  for (auto& rank : ranks_) {
    if (failed()) return false;
    CurrentContext current(library_.cuda, rank->context);
    nccl::Result state = nccl::kSuccess;
    InFlight::Overdue overdue =
        rank->in_flight.Poll(Clock::now(), Seconds(spec().timeout_seconds));
    if (rank->in_flight.size() > 0 && rank->comm != nullptr) {
      std::unique_lock<std::timed_mutex> lock(rank->launching, std::try_to_lock);
      if (lock && rank->comm != nullptr &&
          library_.nccl.CommGetAsyncError(rank->comm, &state) == nccl::kSuccess &&
          state != nccl::kSuccess && state != nccl::kInProgress) {
        overdue = rank->in_flight.Poll(Clock::now(), Seconds(spec().timeout_seconds));
        overdue.found = true;
        overdue.status = library_.Check(state, "NCCL", rank->comm);
      }
    }
    if (!overdue.found) continue;
    const Operation& operation = OperationTable::Get().At(overdue.operation);
    std::string text =
        StrCat(operation.name, "(", operation.operands, ") over axes ", spec().axes,
               " (lane '", spec().lane, "', operation ", overdue.sequence, "), rank ",
               rank->rank, " of ", rank->size, " (device ", rank->device, "): ");
    const bool is_late = overdue.status.success();
    text += is_late ? StrCat("not done after ", spec().timeout_seconds,
                             " s. Other ranks may have stopped or run a different "
                             "program; see JAXCOMM_TIMEOUT")
                    : overdue.status.message();
    text +=
        ". The communicator was aborted, and what ran has no result: call "
        "jaxcomm.finalize() in every process, then jaxcomm.init()";
    DumpFlightRecords(is_late ? "timeout" : "error");
    Fail(Status(is_late ? ErrorCode::kDeadlineExceeded : ErrorCode::kUnavailable,
                std::move(text)),
         /*by_force=*/true);
    Abandon();
    return false;
  }
  return InFlightCount() > 0;
}

void NcclCommunicator::Fail(const Status& reason, bool by_force) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failed()) return;
    failure_ = reason;
    failed_.store(true, std::memory_order_release);
  }
  if (by_force) {
    how_.world->SetBroken();
    for (auto& rank : ranks_) {
      // Whoever holds it waits for a peer, and sees failed(); or is stuck in NCCL.
      std::unique_lock<std::timed_mutex> lock(rank->launching, std::chrono::seconds(1));
      CurrentContext current(library_.cuda, rank->context);
      if (rank->comm != nullptr) library_.nccl.CommAbort(rank->comm);
      rank->comm = nullptr;
      rank->in_flight.Fail();
    }
  }
}

}  // namespace

Status MakeNcclCommunicator(CommunicatorSpec spec, NcclSpec how,
                            std::shared_ptr<Communicator>* communicator) {
  const NcclLibrary& library = how.world->library();
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
