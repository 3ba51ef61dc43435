#include "ffi/backends/nccl/engines/mapped_copies.h"

#include <algorithm>
#include <utility>

#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/library/primary_contexts.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

using MemOp = cuda::MemoryOperation;

constexpr size_t kStagedBytes = MappedCopies::kSlots * MappedCopies::kSlotBytes;
// A word has a line of its own: two processes write to neighbours.
constexpr size_t kLineBytes = 128;
constexpr size_t kWords = PeerMemory::kMostRanks * MappedCopies::kSlots;
constexpr size_t kAllWordsBytes = 3 * kWords * kLineBytes;

// In a rank's memory, behind the slots: the last chunk that another rank has staged for
// it, the last that this one has pulled from it, and the last that may be staged in
// this one's slot.
cuda::Pointer StagedBy(cuda::Pointer memory, int rank, size_t slot) {
  const size_t word = static_cast<size_t>(rank) * MappedCopies::kSlots + slot;
  return memory + kStagedBytes + word * kLineBytes;
}
cuda::Pointer PulledBy(cuda::Pointer memory, int rank, size_t slot) {
  return StagedBy(memory, rank, slot) + kWords * kLineBytes;
}

cuda::Pointer AllowedBy(cuda::Pointer memory, int rank, size_t slot) {
  return PulledBy(memory, rank, slot) + kWords * kLineBytes;
}

// Later than every chunk.
constexpr uint64_t kReleased = uint64_t{1} << 62;

cuda::Pointer PointerOf(const void* address) {
  return reinterpret_cast<cuda::Pointer>(address);
}

}  // namespace

ErrorOr<std::unique_ptr<MappedCopies>> MappedCopies::Create(
    NcclParts& parts, std::unique_ptr<PeerMemory> memory) {
  std::unique_ptr<MappedCopies> made(new MappedCopies(parts, std::move(memory)));
  for (const auto& rank : parts.ranks) {
    if (rank->facts.size < 2) continue;
    CurrentContext current(parts.library.cuda, rank->facts.context);
    Member& member = made->members_[rank->facts.place];
    PeerMemory& shared = *made->memory_;
    for (cuda::Stream* stream :
         {&member.apart, &member.staging, &member.local, &member.pulling}) {
      RETURN_IF_ERROR(parts.library.Try(parts.library.cuda.StreamCreateWithPriority,
                                        stream, cuda::kStreamNonBlocking,
                                        cuda::kHighestPriority));
    }
    for (cuda::Event* event : {&member.ready, &member.staged, &member.copied,
                               &member.pulled, &member.last}) {
      RETURN_IF_ERROR(parts.library.Try(parts.library.cuda.EventCreate, event,
                                        cuda::kEventDisableTiming));
    }
    RETURN_IF_ERROR(shared.Take(rank->facts.place, kStagedBytes + kAllWordsBytes,
                                /*zeroed=*/kAllWordsBytes));
    const cuda::Pointer own = shared.own(rank->facts.place);
    if (own == 0) continue;
    // A device without words of 64 bits refuses the first. Behind the zeros, on their
    // stream, which ranks wait for: on another it could come behind what others write.
    Operations words = {{MemOp::kWrite, StagedBy(own, 0, 0), 0}};
    if (Status able = made->Flush(words, rank->split_phase.stream()); able.failure()) {
      shared.SetUnable(rank->facts.place, able);
    }
  }
  made->memory_->ShareHere();
  return made;
}

MappedCopies::~MappedCopies() {
  Leave();
  for (const auto& rank : parts_.ranks) {
    const Member& member = members_[rank->facts.place];
    CurrentContext current(parts_.library.cuda, rank->facts.context);
    for (cuda::Event event :
         {member.ready, member.staged, member.copied, member.pulled, member.last}) {
      if (event != nullptr) parts_.library.cuda.EventDestroy(event);
    }
    for (cuda::Stream stream :
         {member.apart, member.staging, member.local, member.pulling}) {
      if (stream != nullptr) parts_.library.cuda.StreamDestroy(stream);
    }
  }
}

Status MappedCopies::Follow(cuda::Stream stream, cuda::Stream first,
                            cuda::Event event) {
  RETURN_IF_ERROR(parts_.library.Try(parts_.library.cuda.EventRecord, event, first));
  return parts_.library.Try(parts_.library.cuda.StreamWaitEvent, stream, event, 0u);
}

Status MappedCopies::Flush(Operations& operations, cuda::Stream stream) {
  if (operations.empty()) return OkStatus();
  const Status status = parts_.library.Try(parts_.library.cuda.StreamBatchMemOp, stream,
                                           static_cast<unsigned>(operations.size()),
                                           operations.data(), 0u);
  operations.clear();
  return status;
}

Status MappedCopies::Enqueue(const Call& call, const Recipe& recipe, LocalRank& rank,
                             cuda::Stream stream) {
  RETURN_IF_ERROR(rank.queue.Give(call, stream, rank.queue.Record(call), [&] {
    return Launch(*recipe.mapped, call, rank, stream);
  }));
  rank.queue.counts().Add(*call.site, CallCounts::Kind::kCopied);
  return OkStatus();
}

Status MappedCopies::Start(const Call& call, const Recipe& recipe, LocalRank& rank,
                           cuda::Stream stream) {
  // Behind what was started before, staging waits for the other ranks.
  const bool is_first = rank.split_phase.all_have_ended();
  RETURN_IF_ERROR(Engine::Start(call, recipe, rank, stream));
  if (is_first && recipe.facts.gathers_in_slots) {
    // For speed alone: the call is on its way, also if CUDA refuses.
    (void)parts_.library.cuda.StreamWaitEvent(stream, members_[rank.facts.place].staged,
                                              0u);
  }
  return OkStatus();
}

Status MappedCopies::Launch(const MappedPlan& plan, const Call& call, LocalRank& rank,
                            cuda::Stream stream) {
  Member& member = members_[rank.facts.place];
  RETURN_IF_ERROR(FollowLast(member, stream));
  Streams streams{stream, stream, stream, stream};
  if (!plan.chunks.empty() && !plan.local.empty()) streams.local = member.local;
  if (plan.chunks.size() > 1) {
    streams.staging = member.staging;
    streams.odd = member.pulling;
  }
  const std::pair<cuda::Stream, cuda::Event> beside[] = {
      {streams.local, member.copied},
      {streams.staging, member.staged},
      {streams.odd, member.pulled},
  };
  bool is_recorded = false;
  for (const auto& [each, event] : beside) {
    if (each == stream) continue;
    if (!std::exchange(is_recorded, true)) {
      RETURN_IF_ERROR(
          parts_.library.Try(parts_.library.cuda.EventRecord, member.ready, stream));
    }
    RETURN_IF_ERROR(parts_.library.Try(parts_.library.cuda.StreamWaitEvent, each,
                                       member.ready, 0u));
  }
  rank.queue.MayWait();
  Status status = LaunchChunks(plan, call, rank.facts, streams);
  // Also after a failure: whoever is told of it gives the operands back.
  for (const auto& [each, event] : beside) {
    if (each == stream) continue;
    Status joined = Follow(stream, each, event);
    if (status.success()) status = std::move(joined);
  }
  Status recorded = RecordLast(member, stream);
  return status.failure() ? status : recorded;
}

Status MappedCopies::LaunchChunks(const MappedPlan& plan, const Call& call,
                                  const RankFacts& rank, const Streams& streams) {
  Member& member = members_[rank.place];
  const bool is_apart = streams.staging != streams.even;
  Operations& of_staging = is_apart ? member.of_staging : member.operations;
  const auto copy_local = [&] {
    Status status = OkStatus();
    for (const Step& step : plan.local) {
      if (status.failure()) break;
      status = RunLocalStep(parts_.library, step, call.operands, call.results,
                            streams.local);
    }
    return status;
  };
  if (plan.chunks.empty()) return copy_local();
  // Chunks are staged one ahead: to tell of one and to wait for the next slot is one
  // operation of the stream then.
  const uint64_t first = member.chunk + 1;
  member.chunk += plan.chunks.size();
  const auto stage = [&](size_t i) {
    return i == plan.chunks.size()
               ? OkStatus()
               : Stage(plan, i, first + i, call, rank, of_staging, streams.staging);
  };
  for (size_t i = 0; plan.is_pushed && i < kSlots; ++i) {
    Allow(plan, i, first + i, rank, of_staging);
  }
  RETURN_IF_ERROR(stage(0));
  if (!plan.is_pushed) {
    RETURN_IF_ERROR(parts_.library.Try(parts_.library.cuda.EventRecord, member.staged,
                                       streams.staging));
  }
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    RETURN_IF_ERROR(stage(i + 1));
    if (is_apart) RETURN_IF_ERROR(Flush(of_staging, streams.staging));
    const bool is_odd = i % 2 == 1;
    RETURN_IF_ERROR(Pull(plan, i, first + i, call, rank,
                         is_odd ? member.of_pulling : member.operations,
                         is_odd ? streams.odd : streams.even));
    if (i == 0) RETURN_IF_ERROR(copy_local());
  }
  RETURN_IF_ERROR(Flush(member.of_pulling, streams.odd));
  return Flush(member.operations, streams.even);
}

Status MappedCopies::FollowLast(const Member& member, cuda::Stream stream) {
  if (member.last_stream == nullptr || member.last_stream == stream) return OkStatus();
  return parts_.library.Try(parts_.library.cuda.StreamWaitEvent, stream, member.last,
                            0u);
}

Status MappedCopies::RecordLast(Member& member, cuda::Stream stream) {
  member.last_stream = stream;
  return parts_.library.Try(parts_.library.cuda.EventRecord, member.last, stream);
}

bool MappedCopies::IsBusy(const RankFacts& rank) const {
  const Member& member = members_[rank.place];
  CurrentContext current(parts_.library.cuda, rank.context);
  const auto is_at_work = [this](cuda::Stream stream) {
    return parts_.library.cuda.StreamQuery(stream) == cuda::kNotReady;
  };
  // The rank's streams, too: CUDA may have refused to join them.
  return parts_.library.cuda.EventQuery(member.last) == cuda::kNotReady ||
         is_at_work(member.staging) || is_at_work(member.local) ||
         is_at_work(member.pulling);
}

void MappedCopies::WaitForSlot(Member& member, cuda::Pointer own, size_t slot,
                               Operations& operations) {
  for (int user : member.used[slot].users) {
    operations.push_back(
        {MemOp::kWait, PulledBy(own, user, slot), member.used[slot].chunk});
  }
}

void MappedCopies::Allow(const MappedPlan& plan, size_t i, uint64_t number,
                         const RankFacts& rank, Operations& operations) {
  if (i >= plan.chunks.size()) return;
  Member& member = members_[rank.place];
  const size_t slot = number % kSlots;
  for (int source : plan.chunks[i].sources) {
    WaitForSlot(member, memory_->own(rank.place), slot, operations);
    // This rank reads it before its streams come to what uses the slot next.
    member.used[slot].users.clear();
    const cuda::Pointer word =
        AllowedBy(memory_->of(rank.place, source), rank.rank, slot);
    operations.push_back({MemOp::kWrite, word, number});
  }
}

Status MappedCopies::Stage(const MappedPlan& plan, size_t i, uint64_t number,
                           const Call& call, const RankFacts& rank,
                           Operations& operations, cuda::Stream staging) {
  const MappedPlan::Chunk& chunk = plan.chunks[i];
  Member& member = members_[rank.place];
  const size_t slot = number % kSlots;
  const cuda::Pointer own = memory_->own(rank.place);
  if (!chunk.stages.empty()) {
    if (plan.is_pushed) {
      operations.push_back(
          {MemOp::kWait, AllowedBy(own, chunk.targets[0], slot), number});
    } else {
      WaitForSlot(member, own, slot, operations);
      member.used[slot] = {chunk.targets, number};
    }
    RETURN_IF_ERROR(Flush(operations, staging));
  }
  for (const Step& step : chunk.stages) {
    const cuda::Pointer memory =
        plan.is_pushed ? memory_->of(rank.place, chunk.targets[0]) : own;
    RETURN_IF_ERROR(CopyRows(
        parts_.library, step,
        memory + slot * kSlotBytes + static_cast<cuda::Pointer>(step.to),
        PointerOf(call.operands[step.leaf]) + static_cast<cuda::Pointer>(step.from),
        staging));
  }
  for (int target : chunk.targets) {
    const cuda::Pointer word =
        StagedBy(memory_->of(rank.place, target), rank.rank, slot);
    operations.push_back({MemOp::kWrite, word, number});
  }
  return OkStatus();
}

Status MappedCopies::Pull(const MappedPlan& plan, size_t i, uint64_t number,
                          const Call& call, const RankFacts& rank,
                          Operations& operations, cuda::Stream stream) {
  const MappedPlan::Chunk& chunk = plan.chunks[i];
  const size_t slot = number % kSlots;
  const cuda::Pointer own = memory_->own(rank.place);
  // In one wait with the others: who comes first waits for who comes last.
  for (int source : chunk.sources) {
    operations.push_back({MemOp::kWait, StagedBy(own, source, slot), number});
  }
  if (!chunk.pulls.empty()) RETURN_IF_ERROR(Flush(operations, stream));
  for (const Step& step : chunk.pulls) {
    const cuda::Pointer memory =
        plan.is_pushed ? own : memory_->of(rank.place, step.peer);
    RETURN_IF_ERROR(CopyRows(
        parts_.library, step,
        PointerOf(call.results[step.leaf]) + static_cast<cuda::Pointer>(step.to),
        memory + slot * kSlotBytes + static_cast<cuda::Pointer>(step.from), stream));
  }
  if (plan.is_pushed) {
    Allow(plan, i + kSlots, number + kSlots, rank, operations);
    return OkStatus();
  }
  for (int source : chunk.sources) {
    const cuda::Pointer word =
        PulledBy(memory_->of(rank.place, source), rank.rank, slot);
    operations.push_back({MemOp::kWrite, word, number});
  }
  return OkStatus();
}

bool MappedCopies::Release(const RankFacts& rank) {
  const cuda::Pointer own = memory_->own(rank.place);
  Operations words;
  for (int other = 0; other < rank.size; ++other) {
    for (size_t slot = 0; slot < kSlots; ++slot) {
      words.push_back({MemOp::kWrite, StagedBy(own, other, slot), kReleased});
      words.push_back({MemOp::kWrite, PulledBy(own, other, slot), kReleased});
      words.push_back({MemOp::kWrite, AllowedBy(own, other, slot), kReleased});
    }
  }
  CurrentContext current(parts_.library.cuda, rank.context);
  return Flush(words, members_[rank.place].apart).success();
}

// Again and again: a rank that still lives may write an earlier number. On a thread of
// its own, since what waits behind NCCL's operations goes on once these are aborted.
void MappedCopies::ReleaseAll() {
  (void)Wait({kGraceSeconds}, "the end of copies", [this] {
    bool is_done = true;
    for (const auto& rank : parts_.ranks) {
      if (!takes_part(rank->facts.place)) continue;
      // A thread may be about to give a stream what it launched before the failure.
      const bool is_used = rank->queue.giving > 0 || IsBusy(rank->facts);
      if (is_used && Release(rank->facts)) is_done = false;
    }
    return is_done;
  });
}

void MappedCopies::Abort(LocalRank& rank) {
  MutexLock lock(releasing_);
  if (releaser_.joinable() || !takes_part(rank.facts.place)) return;
  ErrorOr<std::thread> started =
      StartThread([this] { ReleaseAll(); }, "jaxcomm-release");
  if (started) {
    releaser_ = std::move(*started);
  } else {
    (void)Release(rank.facts);
  }
}

void MappedCopies::Leave() {
  if (has_left_) return;
  has_left_ = true;
  {
    MutexLock lock(releasing_);
    if (releaser_.joinable()) releaser_.join();
  }
  const bool is_busy =
      std::any_of(parts_.ranks.begin(), parts_.ranks.end(), [this](const auto& rank) {
        return takes_part(rank->facts.place) && IsBusy(rank->facts);
      });
  memory_->Leave(is_busy, parts_.health.ends_by_force());
}

}  // namespace jaxcomm
