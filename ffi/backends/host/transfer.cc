#include "ffi/backends/host/transfer.h"

#include <cstring>
#include <utility>

#include "ffi/backends/host/reduce.h"
#include "ffi/flight/ticks.h"

namespace jaxcomm {
namespace {

// A step ends after so many pieces: other transfers need their turn.
constexpr int kPiecesAStep = 16;

}  // namespace

void Transfer::Begin(Arena* arena, const CrossingRequest& request, const Work& work) {
  arena_ = arena;
  request_ = request;
  work_ = work;
  state_ = State::kJoining;
  status_ = OkStatus();
  failed_by_peer_ = false;
  came_late_ = false;
  crossing_ = nullptr;
  channel_ = -1;
  staged_ = 0;
  read_ = 0;
}

Transfer::Outcome Transfer::Finish(Status status) {
  if (status.failure()) absent_at_end_ = absent();
  if (crossing_ != nullptr) arena_->Leave(crossing_);
  status_ = std::move(status);
  state_ = State::kDone;
  return Outcome::kDone;
}

void Transfer::Fail(const Status& error) {
  if (state_ == State::kDone) return;
  if (crossing_ == nullptr) {
    Finish(error);
    return;
  }
  arena_->Fail(crossing_, error);
  Finish(error);
}

Transfer::Outcome Transfer::FinishWithPeersError() {
  failed_by_peer_ = true;
  arena_->ForgetLateFailure(crossing_);
  const auto code =
      static_cast<ErrorCode>(crossing_->error.load(std::memory_order_acquire));
  return Finish(Status(code, crossing_->failure.Load()));
}

uint64_t Transfer::absent() const {
  if (state_ == State::kDone) return absent_at_end_;
  if (crossing_ == nullptr) return 0;
  uint64_t absent = 0;
  for (uint64_t mask = request_.members; mask != 0; mask &= mask - 1) {
    const int process = __builtin_ctzll(mask);
    if (arena_->seat(crossing_, process).state.load(std::memory_order_acquire) ==
        Seat::kAbsent) {
      absent |= uint64_t{1} << process;
    }
  }
  return absent;
}

uint64_t Transfer::Needs(uint64_t gone) const {
  if (crossing_ == nullptr) return gone & request_.members;
  uint64_t needed = 0;
  for (uint64_t mask = gone & request_.members; mask != 0; mask &= mask - 1) {
    const int process = __builtin_ctzll(mask);
    const uint32_t state =
        arena_->seat(crossing_, process).state.load(std::memory_order_acquire);
    // Ready operands stay in the crossing to be read.
    if (state == Seat::kLeft || state == Seat::kReady) continue;
    needed |= uint64_t{1} << process;
  }
  return needed;
}

void Transfer::Abandon(uint64_t gone) {
  if (crossing_ == nullptr) return;
  for (uint64_t mask = gone & request_.members; mask != 0; mask &= mask - 1) {
    arena_->Abandon(crossing_, __builtin_ctzll(mask));
  }
}

Transfer::Outcome Transfer::Step() {
  if (state_ == State::kDone) return Outcome::kDone;
  if (state_ == State::kJoining) {
    crossing_ = arena_->Join(request_, !work_.stream->is_inline);
    if (crossing_ == nullptr) {
      Status broken = arena_->status();
      return broken.failure() ? Finish(std::move(broken)) : Outcome::kIdle;
    }
    if (crossing_->error.load(std::memory_order_acquire) != 0) {
      arena_->Ring(request_.members);
      came_late_ = true;
      return FinishWithPeersError();
    }
    state_ = State::kMoving;
    if (work_.stream->is_inline) {
      char* const data = arena_->inline_data(crossing_, arena_->self());
      for (const Stage& stage : work_.stream->stages) {
        Write(stage, data + stage.offset, Store::IntoCaches());
      }
      arena_->seat(crossing_, arena_->self())
          .state.store(Seat::kReady, std::memory_order_release);
    }
    arena_->Ring(request_.members);
  }
  if (crossing_->error.load(std::memory_order_acquire) != 0) {
    return FinishWithPeersError();
  }
  if (Status broken = arena_->status(); broken.failure()) {
    return Finish(std::move(broken));
  }
  return work_.stream->is_inline ? StepInline() : StepStreaming();
}

Transfer::Outcome Transfer::StepInline() {
  if (work_.plan->pairwise) {
    for (const Read& read : work_.stream->reads) {
      if (!IsReady(read)) return Outcome::kIdle;
    }
  } else {
    for (uint64_t mask = request_.members; mask != 0; mask &= mask - 1) {
      const uint32_t state = arena_->seat(crossing_, __builtin_ctzll(mask))
                                 .state.load(std::memory_order_acquire);
      if (state < Seat::kReady) return Outcome::kIdle;
    }
  }
  for (const Read& read : work_.stream->reads) Perform(read);
  return Finish(OkStatus());
}

Transfer::Outcome Transfer::StepStreaming() {
  const StreamPlan& stream = *work_.stream;
  if (channel_ < 0) {
    channel_ = crossing_->channel.load(std::memory_order_acquire);
    if (channel_ < 0) {
      if (absent() == 0) arena_->TryAssignChannel(crossing_);
      channel_ = crossing_->channel.load(std::memory_order_acquire);
      if (channel_ < 0) return Outcome::kIdle;
    }
  }
  bool moved = false;
  for (int piece = 0; piece < kPiecesAStep; ++piece) {
    bool idle = true;
    if (staged_ < stream.stages.size()) {
      const Stage& stage = stream.stages[staged_];
      if (static_cast<int64_t>(read_) >= stage.after && SlotIsFree(staged_)) {
        WriteChunk(stage);
        idle = false;
      }
    }
    if (read_ < stream.reads.size() && IsReady(stream.reads[read_])) {
      ReadChunks(stream.reads[read_++]);
      idle = false;
    }
    if (idle) break;
    moved = true;
  }
  if (staged_ == stream.stages.size() && read_ == stream.reads.size()) {
    return Finish(OkStatus());
  }
  return moved ? Outcome::kMoved : Outcome::kIdle;
}

void Transfer::WriteChunk(const Stage& stage) {
  const int self = arena_->self();
  Seat& seat = arena_->seat(crossing_, self);
  StoreTuner& tuner = arena_->tuner();
  const bool past_caches = tuner.NextPastCaches();
  const uint64_t bit = uint64_t{1} << (staged_ % 64);
  const uint64_t others = seat.past_caches.load(std::memory_order_relaxed) & ~bit;
  seat.past_caches.store(past_caches ? others | bit : others,
                         std::memory_order_relaxed);
  const uint64_t begin = Ticks();
  Write(stage, arena_->slot(channel_, self, staged_),
        past_caches ? Store::PastCaches() : Store::IntoCaches());
  const auto copies = stage.what == Stage::kCopy ? stage.ranks.size() : 1;
  tuner.Took(StoreTuner::kWrite, past_caches,
             static_cast<int64_t>(copies) * Bytes(stage.piece), Ticks() - begin);
  seat.written.store(++staged_, std::memory_order_release);
  arena_->Ring(stage.readers);
}

void Transfer::ReadChunks(const Read& read) {
  const uint64_t begin = Ticks();
  Perform(read);
  const uint64_t ticks = Ticks() - begin;
  int64_t chunks = 0, past_caches = 0;
  uint64_t writers = 0;
  for (const Source& source : read.sources) {
    if (source.rank >= 0) continue;
    const int writer = source.chunk.process;
    const auto chunk = static_cast<uint64_t>(source.chunk.chunk);
    const uint64_t ways =
        arena_->seat(crossing_, writer).past_caches.load(std::memory_order_relaxed);
    ++chunks;
    past_caches += ways >> (chunk % 64) & 1;
    arena_->passed(crossing_, arena_->self(), writer)
        .store(chunk + 1, std::memory_order_release);
    writers |= uint64_t{1} << writer;
  }
  arena_->Ring(writers);
  if (past_caches == 0 || past_caches == chunks) {
    arena_->tuner().Took(StoreTuner::kRead, past_caches > 0, chunks * Bytes(read.piece),
                         ticks);
  }
}

int64_t Transfer::Bytes(const Block& piece) const {
  const Leaf& leaf = (*work_.leaves)[work_.plan->moves[piece.move].leaf];
  return piece.rows() * piece.width() * static_cast<int64_t>(leaf.element_bytes);
}

bool Transfer::SlotIsFree(size_t chunk) const {
  const StreamPlan& stream = *work_.stream;
  const auto window = static_cast<size_t>(stream.window);
  if (chunk < window) return true;
  const uint64_t old = chunk - window;
  for (uint64_t mask = stream.stages[old].readers; mask != 0; mask &= mask - 1) {
    if (arena_->passed(crossing_, __builtin_ctzll(mask), arena_->self())
            .load(std::memory_order_acquire) <= old) {
      return false;
    }
  }
  return true;
}

bool Transfer::IsReady(const Read& read) const {
  for (const Source& source : read.sources) {
    if (source.rank >= 0) continue;
    const Seat& seat = arena_->seat(crossing_, source.chunk.process);
    if (work_.stream->is_inline) {
      if (seat.state.load(std::memory_order_acquire) < Seat::kReady) return false;
    } else if (seat.written.load(std::memory_order_acquire) <=
               static_cast<uint64_t>(source.chunk.chunk)) {
      return false;
    }
  }
  return true;
}

const char* Transfer::OperandAt(int rank, const Block& piece, int64_t row) const {
  const Move& move = work_.plan->moves[piece.move];
  const size_t width = (*work_.leaves)[move.leaf].element_bytes;
  return static_cast<const char*>(work_.buffers.operands[rank][move.leaf]) +
         (move.RowAt(move.from, row) + piece.inner_begin) * width;
}

char* Transfer::ResultAt(int rank, const Block& piece, int64_t row) const {
  const Move& move = work_.plan->moves[piece.move];
  const size_t width = (*work_.leaves)[move.leaf].element_bytes;
  return static_cast<char*>(work_.buffers.results[rank][move.leaf]) +
         (move.RowAt(move.to, row) + piece.inner_begin) * width;
}

void Transfer::Write(const Stage& stage, char* to, const Store& into) const {
  const Block& piece = stage.piece;
  const Move& move = work_.plan->moves[piece.move];
  const Leaf& leaf = (*work_.leaves)[move.leaf];
  const auto width = static_cast<int64_t>(leaf.element_bytes);
  const int64_t bytes = piece.width() * width;
  const auto copy = [bytes](const Store& store, char* to, const char* from) {
    void* const targets[] = {to};
    store.Copy(targets, 1, from, bytes);
  };
  if (stage.what == Stage::kResult) {
    for (int64_t row = piece.row_begin; row < piece.row_end; ++row, to += bytes) {
      copy(into, to, ResultAt(stage.ranks[0], piece, row));
    }
    return;
  }
  if (stage.what == Stage::kReduce) {
    const ReduceKernels kernels = FindReduceKernels(leaf.dtype, work_.reduce);
    const int num_sources = static_cast<int>(stage.ranks.size());
    PointerPerRank<const void> sources(num_sources);
    for (int64_t row = piece.row_begin; row < piece.row_end; ++row, to += bytes) {
      for (int i = 0; i < num_sources; ++i)
        sources[i] = OperandAt(stage.ranks[i], piece, row);
      void* targets[] = {to};
      into.Reduce(kernels, targets, 1, sources.data(), num_sources, piece.width(),
                  width);
    }
    return;
  }
  const Store local_store(work_.plan->touched, leaf.bytes());
  for (int rank : stage.ranks) {
    for (int64_t row = piece.row_begin; row < piece.row_end; ++row, to += bytes) {
      const char* const from = OperandAt(rank, piece, row);
      copy(into, to, from);
      for (int local : stage.local_targets)
        copy(local_store, ResultAt(local, piece, row), from);
    }
  }
}

const char* Transfer::At(const Source& source, const Block& piece) const {
  const int process = source.chunk.process;
  const Move& move = work_.plan->moves[piece.move];
  const auto width = static_cast<int64_t>((*work_.leaves)[move.leaf].element_bytes);
  const char* const base =
      work_.stream->is_inline
          ? arena_->inline_data(crossing_, process) + source.chunk.offset
          : arena_->slot(channel_, process, static_cast<uint64_t>(source.chunk.chunk));
  return base + source.part * piece.rows() * piece.width() * width;
}

void Transfer::Perform(const Read& read) const {
  const Block& piece = read.piece;
  const Move& move = work_.plan->moves[piece.move];
  const Leaf& leaf = (*work_.leaves)[move.leaf];
  const auto width = static_cast<int64_t>(leaf.element_bytes);
  const int64_t bytes = piece.width() * width;
  const Store store =
      read.staged ? Store::IntoCaches() : Store(work_.plan->touched, leaf.bytes());
  const ReduceKernels kernels = FindReduceKernels(leaf.dtype, work_.reduce);
  const int num_sources = static_cast<int>(read.sources.size());
  const int num_targets = static_cast<int>(read.targets.size());
  PointerPerRank<const void> sources(num_sources);
  PointerPerRank<void> targets(num_targets);
  for (int64_t row = piece.row_begin; row < piece.row_end; ++row) {
    for (int i = 0; i < num_sources; ++i) {
      const Source& source = read.sources[i];
      if (source.rank >= 0) {
        sources[i] = OperandAt(source.rank, piece, row);
      } else {
        sources[i] = At(source, piece) + (row - piece.row_begin) * bytes;
      }
    }
    for (int i = 0; i < num_targets; ++i)
      targets[i] = ResultAt(read.targets[i], piece, row);
    if (read.running) {
      for (int i = 0; i < num_targets; ++i) {
        kernels.reduce(targets[i], sources.data(), read.prefix[i], piece.width());
      }
    } else if (num_sources == 0) {
      if (move.identity) {
        kernels.identity(targets[0], piece.width());
      } else {
        std::memset(targets[0], 0, bytes);
      }
      store.Copy(targets.data() + 1, num_targets - 1, targets[0], bytes);
    } else if (num_sources == 1) {
      store.Copy(targets.data(), num_targets, sources[0], bytes);
    } else {
      store.Reduce(kernels, targets.data(), num_targets, sources.data(), num_sources,
                   piece.width(), width);
    }
  }
}

}  // namespace jaxcomm
