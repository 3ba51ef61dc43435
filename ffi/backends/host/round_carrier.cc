#include "ffi/backends/host/round_carrier.h"

#include <utility>

#include "ffi/backends/host/process_set.h"
#include "ffi/backends/host/stream_plan.h"
#include "ffi/backends/host/transfer.h"
#include "ffi/backends/host/value_exchange.h"
#include "ffi/flight/flight_dump.h"

namespace jaxcomm {

// A round on its way.
struct RoundCarrier::Passage {
  std::unique_ptr<LocalRound> round;
  uint64_t shared_tag = 0;
  Transfer transfer;
  std::shared_ptr<const StreamPlan> stream;
  std::unique_ptr<ValueExchange> exchange;  // while it is under way
};

RoundCarrier::RoundCarrier(const HostContext& context, const GroupMembers& members,
                           Complete complete)
    : context_(context),
      members_(members),
      failure_(context.spec, members),
      complete_(std::move(complete)) {}

CrossingRequest RoundCarrier::RequestOf(const Passage& passage, uint64_t step) const {
  const CommunicatorSpec& spec = context_.spec;
  const LocalRound& round = *passage.round;
  CrossingRequest request;
  request.key.communicator =
      static_cast<uint64_t>(spec.key) + spec.generation * 0x9e3779b97f4a7c15;
  request.key.group = members_.index * 2 + step;
  request.key.run = round.run;
  request.key.tag = passage.shared_tag;
  request.members = members_.processes;
  request.signature = round.call_site->signature();
  request.number = static_cast<uint64_t>(round.number);
  request.call = round.call_site->description();
  return request;
}

void RoundCarrier::BeginMoves(Passage& passage, Scheduler* scheduler, int helpers) {
  LocalRound& round = *passage.round;
  CallSite& site = *round.call_site;
  Arena& arena = context_.spec.process_set->arena();
  const auto make = [&] {
    return std::make_shared<const StreamPlan>(
        MakeStreamPlan(*round.plan, site.results(), members_.process_of, arena.self()));
  };
  passage.stream = round.plan == &round.own_plan
                       ? make()
                       : site.Derived<StreamPlan>(members_.id, make);
  if (!passage.stream->local_moves.empty()) {
    auto offered = RunMoves(site, *round.plan, passage.stream->local_moves,
                            round.buffers(), scheduler, &round.offer, helpers);
    if (offered != nullptr) round.offered.push_back(std::move(offered));
  }
  Transfer::Work work;
  work.plan = round.plan;
  work.stream = passage.stream.get();
  work.leaves = &site.results();
  work.reduce = site.attributes().reduce;
  work.buffers = round.buffers();
  passage.transfer.Begin(&arena, RequestOf(passage, 0), work);
}

void RoundCarrier::BeginExchange(Passage& passage) {
  Arena& arena = context_.spec.process_set->arena();
  passage.exchange =
      std::make_unique<ValueExchange>(*passage.round, members_, arena.self());
  passage.transfer.Begin(&arena, RequestOf(passage, 1), passage.exchange->work());
}

bool RoundCarrier::Advance(Passage& passage, Status* status) {
  LocalRound& round = *passage.round;
  *status = passage.transfer.status();
  if (status->failure()) {
    if (passage.transfer.failed_by_peer()) {
      *status = failure_.StatusOf(round, passage.transfer);
    }
    DumpFlightRecords("failure of a peer");
    return true;
  }
  if (passage.exchange == nullptr) return true;
  const std::unique_ptr<ValueExchange> exchange = std::move(passage.exchange);
  round.own_plan = HostPlan();
  round.plan = &round.own_plan;
  *status = MakeHostPlan(*round.call_site, members_.size(), exchange->operands_of(),
                         &round.own_plan);
  if (status->failure()) return true;
  BeginMoves(passage, /*scheduler=*/nullptr, /*helpers=*/0);
  return false;
}

void RoundCarrier::Carry(int rank, const Call& call, std::unique_ptr<LocalRound> round,
                         int helpers) {
  auto passage = std::make_shared<Passage>();
  passage->round = std::move(round);
  passage->shared_tag = call.shared_tag;
  if (call.site->plan_reads_operands()) {
    BeginExchange(*passage);
  } else {
    BeginMoves(*passage, call.scheduler, helpers);
  }
  Status status;
  while (context_.spec.process_set->RunBriefly(&passage->transfer)) {
    if (!Advance(*passage, &status)) continue;
    complete_(std::move(passage->round), rank, std::move(status));
    return;
  }
  {
    MutexLock lock(mutex_);
    ++pending_;
  }
  Continue(std::move(passage));
}

void RoundCarrier::Continue(std::shared_ptr<Passage> passage) {
  ProcessSet& set = *context_.spec.process_set;
  PendingTransfer pending;
  pending.transfer = &passage->transfer;
  pending.begin = passage->round->waiting_since;
  pending.timeout_seconds = context_.spec.timeout_seconds;
  pending.owner = context_.id;
  pending.describe = [this, passage](uint64_t processes, bool ended) {
    return failure_.TextOf(*passage->round, processes, ended);
  };
  // Keeps the communicator, were it closed meanwhile.
  pending.done = [this, passage, owner = context_.owner.shared_from_this()] {
    Status status;
    if (!Advance(*passage, &status)) {
      Continue(passage);
      return;
    }
    {
      MutexLock lock(mutex_);
      --pending_;
    }
    complete_(std::move(passage->round), /*rank=*/-1, std::move(status));
  };
  set.Continue(std::move(pending));
  // Close() may have come between, and ProcessSet::Abort() before set.Continue(): it
  // did not see this transfer then.
  Status closed;
  {
    MutexLock lock(mutex_);
    closed = closed_;
  }
  if (closed.failure()) set.Abort(context_.id, closed);
}

void RoundCarrier::Close(const Status& reason) {
  MutexLock lock(mutex_);
  if (closed_.success()) closed_ = reason;
}

int64_t RoundCarrier::pending() const {
  MutexLock lock(mutex_);
  return pending_;
}

}  // namespace jaxcomm
