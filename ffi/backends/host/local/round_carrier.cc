#include "ffi/backends/host/local/round_carrier.h"

#include <utility>
#include <vector>

#include "ffi/backends/host/arena/process_set.h"
#include "ffi/backends/host/arena/stream_plan.h"
#include "ffi/backends/host/arena/transfer.h"
#include "ffi/flight/flight_dump.h"

namespace jaxcomm {
namespace {

// The operands that a planner reads, brought to all processes of a group: an all-gather
// of them to one rank of each process.
class ValueExchange {
 public:
  ValueExchange(const LocalRound& round, const GroupMembers& members, int self);

  CallMoves moves() const {
    return {&plan_, &site_.operands(), ReduceOp::kSum, from_, results_of_.data()};
  }
  const StreamPlan& stream() const { return stream_; }
  // The gathered operands by rank and operand, as planners want them.
  const void* const* const* operands_of() const { return operands_of_.data(); }

 private:
  const CallSite& site_;
  const void* const* const* const from_;
  std::vector<int> targets_;  // a rank of each process
  HostPlan plan_;
  StreamPlan stream_;
  std::vector<std::vector<char>> gathered_;  // by operand: those of all ranks in turn
  std::vector<void*> results_;               // the same, as pointers
  std::vector<void* const*> results_of_;
  std::vector<const void*> operands_;
  std::vector<const void* const*> operands_of_;
};

ValueExchange::ValueExchange(const LocalRound& round, const GroupMembers& members,
                             int self)
    : site_(*round.call_site), from_(round.operands.data()) {
  const auto size = static_cast<size_t>(members.size());
  const size_t leaves = site_.operands().size();
  uint64_t seen = 0;
  for (int rank = 0; rank < members.size(); ++rank) {
    const uint64_t process = uint64_t{1} << members.process_of[rank];
    if ((seen & process) == 0) targets_.push_back(rank);
    seen |= process;
  }
  gathered_.resize(leaves);
  results_.assign(leaves, nullptr);
  operands_.assign(size * leaves, nullptr);
  for (size_t leaf = site_.plan_reads_operands_from(); leaf < leaves; ++leaf) {
    const auto bytes = static_cast<size_t>(site_.operands()[leaf].bytes());
    gathered_[leaf].resize(size * bytes);
    results_[leaf] = gathered_[leaf].data();
    for (size_t rank = 0; rank < size; ++rank) {
      operands_[rank * leaves + leaf] = gathered_[leaf].data() + rank * bytes;
      Move move;
      move.leaf = static_cast<int>(leaf);
      move.sources = Ranks::One(static_cast<int>(rank));
      move.targets = Ranks::Of(targets_);
      move.inner = site_.operands()[leaf].elements;
      move.to.offset = static_cast<int64_t>(rank) * move.inner;
      plan_.moves.push_back(std::move(move));
    }
  }
  results_of_.assign(size, results_.data());
  for (size_t rank = 0; rank < size; ++rank) {
    operands_of_.push_back(operands_.data() + rank * leaves);
  }
  stream_ = MakeStreamPlan(plan_, site_.operands(), members.process_of, self);
}

}  // namespace

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
    auto offered = RunMoves(round.moves(), passage.stream->local_moves, scheduler,
                            &round.offer, helpers);
    if (offered != nullptr) round.offered.push_back(std::move(offered));
  }
  // Of every call the first transfer comes under one key: there, calls that differ
  // meet.
  const uint64_t step = round.call_site->plan_reads_operands() ? 1 : 0;
  passage.transfer.Begin(&arena, RequestOf(passage, step), *passage.stream,
                         round.moves());
}

void RoundCarrier::BeginExchange(Passage& passage) {
  Arena& arena = context_.spec.process_set->arena();
  passage.exchange =
      std::make_unique<ValueExchange>(*passage.round, members_, arena.self());
  passage.transfer.Begin(&arena, RequestOf(passage, 0), passage.exchange->stream(),
                         passage.exchange->moves());
}

std::optional<Status> RoundCarrier::Advance(Passage& passage) {
  LocalRound& round = *passage.round;
  const Transfer& transfer = passage.transfer;
  if (transfer.status().failure()) {
    Status status = transfer.failed_by_peer() ? failure_.StatusOf(round, transfer)
                                              : transfer.status();
    // One that is refused has nothing to add to the record of the first failure.
    if (transfer.has_joined()) DumpFlightRecords("failure of a peer");
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
  pending.describe = [this, passage](uint64_t processes, Hindrance hindrance) {
    return failure_.TextOf(*passage->round, processes, hindrance);
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
