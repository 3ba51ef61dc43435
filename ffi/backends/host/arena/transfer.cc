#include "ffi/backends/host/arena/transfer.h"

#include <algorithm>
#include <utility>

namespace jaxcomm {
namespace {

// A step ends after so many pieces: other transfers need their turn.
constexpr int kPiecesAStep = 16;

}  // namespace

void Transfer::Begin(Arena* arena, const CrossingRequest& request,
                     const StreamPlan& stream, const CallMoves& moves) {
  arena_ = arena;
  request_ = request;
  stream_ = &stream;
  moves_ = moves;
  state_ = State::kJoining;
  status_ = OkStatus();
  failed_by_peer_ = false;
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
    arena_->FailAll(error);
  } else {
    arena_->Fail(crossing_, error);
  }
  Finish(error);
}

Transfer::Outcome Transfer::FinishWithPeersError() {
  failed_by_peer_ = true;
  return Finish(arena_->FailureOf(crossing_));
}

Transfer::Outcome Transfer::FinishRefused(Status refusal) {
  failed_by_peer_ = true;
  return Finish(std::move(refusal));
}

uint64_t Transfer::absent() const {
  if (state_ == State::kDone) return absent_at_end_;
  if (crossing_ == nullptr) return 0;
  uint64_t absent = 0;
  for (uint64_t mask = request_.members; mask != 0; mask &= mask - 1) {
    const int process = __builtin_ctzll(mask);
    if (!arena_->seat(crossing_, process).Has(Seat::kCame)) {
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
    const Seat& seat = arena_->seat(crossing_, process);
    // Its operands stay in the crossing to be read. If it left without any, it was
    // done, or the crossing has failed.
    if (seat.Has(Seat::kHoldsOperand) || seat.Has(Seat::kLeft)) continue;
    needed |= uint64_t{1} << process;
  }
  return needed;
}

uint64_t Transfer::Lacks() const {
  const StreamPlan& stream = *stream_;
  if (stream.is_inline && !moves_.plan->pairwise) return absent();
  uint64_t needed = 0;
  for (size_t i = read_; i < stream.reads.size(); ++i) {
    for (const Source& source : stream.reads[i].sources) {
      if (source.rank < 0) needed |= uint64_t{1} << source.chunk.process;
    }
  }
  const auto window = static_cast<size_t>(stream.window);
  for (size_t i = std::max(staged_, window); i < stream.stages.size(); ++i) {
    needed |= stream.stages[i - window].readers;
  }
  return needed & absent();
}

void Transfer::SayWhatItLacks() const {
  if (crossing_ == nullptr || state_ == State::kDone) return;
  arena_->seat(crossing_, arena_->self())
      .lacks.store(Lacks(), std::memory_order_release);
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
    crossing_ = arena_->Join(request_, !stream_->is_inline);
    if (crossing_ == nullptr) {
      Status refusal = arena_->status();
      return refusal.failure() ? FinishRefused(std::move(refusal)) : Outcome::kIdle;
    }
    // The calls differ.
    if (crossing_->error.load(std::memory_order_acquire) != 0) {
      return FinishWithPeersError();
    }
    state_ = State::kMoving;
    if (stream_->is_inline) {
      char* const data = arena_->inline_data(crossing_, arena_->self());
      for (const Stage& stage : stream_->stages) {
        Write(stage, data + stage.offset);
      }
      arena_->seat(crossing_, arena_->self()).Add(Seat::kHoldsOperand);
    }
    arena_->Ring(request_.members);
  }
  if (crossing_->error.load(std::memory_order_acquire) != 0) {
    return FinishWithPeersError();
  }
  if (Status refusal = arena_->status(); refusal.failure()) {
    return FinishRefused(std::move(refusal));
  }
  return stream_->is_inline ? StepInline() : StepStreaming();
}

Transfer::Outcome Transfer::StepInline() {
  if (moves_.plan->pairwise) {
    for (const Read& read : stream_->reads) {
      if (!IsReady(read)) return Outcome::kIdle;
    }
  } else {
    for (uint64_t mask = request_.members; mask != 0; mask &= mask - 1) {
      const Seat& seat = arena_->seat(crossing_, __builtin_ctzll(mask));
      if (!seat.Has(Seat::kHoldsOperand)) return Outcome::kIdle;
    }
  }
  for (const Read& read : stream_->reads) Perform(read);
  return Finish(OkStatus());
}

Transfer::Outcome Transfer::StepStreaming() {
  const StreamPlan& stream = *stream_;
  if (channel_ < 0) {
    if (absent() == 0) arena_->TryAssignChannel(crossing_);
    const ErrorOr<int> channel = arena_->ChannelOf(crossing_);
    if (channel.has_error()) {
      Fail(channel.error());
      return Outcome::kDone;
    }
    channel_ = *channel;
    if (channel_ < 0) return Outcome::kIdle;
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
  Write(stage, arena_->slot(channel_, self, staged_));
  arena_->seat(crossing_, self).written.store(++staged_, std::memory_order_release);
  arena_->Ring(stage.readers);
}

void Transfer::ReadChunks(const Read& read) {
  Perform(read);
  uint64_t writers = 0;
  for (const Source& source : read.sources) {
    if (source.rank >= 0) continue;
    const int writer = source.chunk.process;
    arena_->passed(crossing_, arena_->self(), writer)
        .store(static_cast<uint64_t>(source.chunk.chunk) + 1,
               std::memory_order_release);
    writers |= uint64_t{1} << writer;
  }
  arena_->Ring(writers);
}

bool Transfer::SlotIsFree(size_t chunk) const {
  const auto window = static_cast<size_t>(stream_->window);
  if (chunk < window) return true;
  const uint64_t old = chunk - window;
  for (uint64_t mask = stream_->stages[old].readers; mask != 0; mask &= mask - 1) {
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
    if (stream_->is_inline) {
      if (!seat.Has(Seat::kHoldsOperand)) return false;
    } else if (seat.written.load(std::memory_order_acquire) <=
               static_cast<uint64_t>(source.chunk.chunk)) {
      return false;
    }
  }
  return true;
}

void Transfer::Write(const Stage& stage, char* to) const {
  const Store into = Store::IntoCaches();  // the readers read it at once
  const Block& piece = stage.piece;
  const BlockMover mover(moves_, piece);
  const int64_t bytes = mover.row_bytes();
  const auto copy = [bytes](const Store& store, char* to, const char* from) {
    void* const targets[] = {to};
    store.Copy(targets, 1, from, bytes);
  };
  if (stage.what == Stage::kResult) {
    for (int64_t row = piece.row_begin; row < piece.row_end; ++row, to += bytes) {
      copy(into, to, mover.Result(stage.ranks[0]) + mover.To(row));
    }
    return;
  }
  if (stage.what == Stage::kReduce) {
    const ReduceKernels kernels = mover.kernels();
    const int num_sources = static_cast<int>(stage.ranks.size());
    PointerPerRank<const void> sources(num_sources);
    for (int64_t row = piece.row_begin; row < piece.row_end; ++row, to += bytes) {
      const int64_t from = mover.From(row);
      for (int i = 0; i < num_sources; ++i) {
        sources[i] = mover.Operand(stage.ranks[i]) + from;
      }
      void* targets[] = {to};
      mover.MakeRow(kernels, into, sources.data(), num_sources, targets, 1);
    }
    return;
  }
  const Store local_store = mover.result_store();
  for (int rank : stage.ranks) {
    for (int64_t row = piece.row_begin; row < piece.row_end; ++row, to += bytes) {
      const char* const from = mover.Operand(rank) + mover.From(row);
      copy(into, to, from);
      for (int local : stage.local_targets) {
        copy(local_store, mover.Result(local) + mover.To(row), from);
      }
    }
  }
}

const char* Transfer::At(const Source& source, int64_t piece_bytes) const {
  const int process = source.chunk.process;
  const char* const base =
      stream_->is_inline
          ? arena_->inline_data(crossing_, process) + source.chunk.offset
          : arena_->slot(channel_, process, static_cast<uint64_t>(source.chunk.chunk));
  return base + source.part * piece_bytes;
}

void Transfer::Perform(const Read& read) const {
  const Block& piece = read.piece;
  const BlockMover mover(moves_, piece);
  const Store store = read.staged ? Store::IntoCaches() : mover.result_store();
  const ReduceKernels kernels = mover.kernels();
  const int num_sources = static_cast<int>(read.sources.size());
  const int num_targets = static_cast<int>(read.targets.size());
  PointerPerRank<const void> sources(num_sources);
  PointerPerRank<void> targets(num_targets);
  for (int64_t row = piece.row_begin; row < piece.row_end; ++row) {
    const int64_t from = mover.From(row), to = mover.To(row);
    const int64_t in_chunk = (row - piece.row_begin) * mover.row_bytes();
    for (int i = 0; i < num_sources; ++i) {
      const Source& source = read.sources[i];
      sources[i] = source.rank >= 0 ? mover.Operand(source.rank) + from
                                    : At(source, mover.bytes()) + in_chunk;
    }
    for (int i = 0; i < num_targets; ++i) {
      targets[i] = mover.Result(read.targets[i]) + to;
    }
    if (!read.running) {
      mover.MakeRow(kernels, store, sources.data(), num_sources, targets.data(),
                    num_targets);
      continue;
    }
    for (int i = 0; i < num_targets; ++i) {
      kernels.reduce(targets[i], sources.data(), read.prefix[i], piece.width());
    }
  }
}

}  // namespace jaxcomm
