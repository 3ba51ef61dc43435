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
  const StreamPlan* stream = nullptr;
  StreamPlan own_stream;                    // of a round with a plan of its own
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
  const CallSite& site = *round.call_site;
  Arena& arena = context_.spec.process_set->arena();
  const auto make = [&]() -> ErrorOr<StreamPlan> {
    return MakeStreamPlan(*round.plan, site.results(), members_.process_of,
                          arena.self());
  };
  if (round.plan == &round.own_plan) {
    passage.own_stream = *make();
    passage.stream = &passage.own_stream;
  } else {
    MutexLock lock(mutex_);
    passage.stream = *streams_.Find(site, make);
  }
  if (!passage.stream->local_moves.empty()) {
    auto offered = RunMoves(site, *round.plan, passage.stream->local_moves,
                            round.buffers(), scheduler, &round.offer, helpers);
    if (offered != nullptr) round.offered.push_back(std::move(offered));
  }
  Transfer::Work work;
  work.plan = round.plan;
  work.stream = passage.stream;
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

std::optional<Status> RoundCarrier::Advance(Passage& passage) {
  LocalRound& round = *passage.round;
  const Transfer& transfer = passage.transfer;
  if (transfer.status().failure()) {
    Status status = transfer.failed_by_peer() ? failure_.StatusOf(round, transfer)
                                              : transfer.status();
    DumpFlightRecords("failure of a peer");
    return status;
  }
  if (passage.exchange == nullptr) return OkStatus();
  const std::unique_ptr<ValueExchange> exchange = std::move(passage.exchange);
  ASSIGN_OR_RETURN(round.own_plan, MakeHostPlan(*round.call_site, members_.size(),
                                                exchange->operands_of()));
  round.plan = &round.own_plan;
  BeginMoves(passage, /*scheduler=*/nullptr, /*helpers=*/0);
  return std::nullopt;
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
  while (context_.spec.process_set->RunBriefly(&passage->transfer)) {
    if (auto ended = Advance(*passage)) {
      return complete_(std::move(passage->round), rank, *std::move(ended));
    }
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
    auto ended = Advance(*passage);
    if (!ended) return Continue(passage);
    {
      MutexLock lock(mutex_);
      --pending_;
    }
    complete_(std::move(passage->round), /*rank=*/-1, *std::move(ended));
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
