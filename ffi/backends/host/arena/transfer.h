// The part of this process in one crossing: a state machine that never blocks.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_ARENA_TRANSFER_H_
#define JAXCOMM_FFI_BACKENDS_HOST_ARENA_TRANSFER_H_

#include <cstdint>

#include "ffi/backends/host/arena/arena.h"
#include "ffi/backends/host/arena/stream_plan.h"
#include "ffi/backends/host/reduce/execute.h"
#include "ffi/backends/host/reduce/store.h"
#include "ffi/base/status.h"

namespace jaxcomm {

class Transfer {
 public:
  // `stream` says how the moves cross. It must live longer.
  void Begin(Arena* arena, const CrossingRequest& request, const StreamPlan& stream,
             const CallMoves& moves);

  enum class Outcome { kIdle, kMoved, kDone };
  // Moves all that can move now. One thread at a time.
  Outcome Step();
  // Fails the crossing for all its members, and what else the processes do together.
  // Only between steps.
  void Fail(const Status& error);

  // How it ended.
  const Status& status() const { return status_; }

  // Whether another process failed it, or another collective did. The text of that is
  // then in status().
  bool failed_by_peer() const { return failed_by_peer_; }
  // Whether it waited for others.
  bool has_joined() const { return crossing_ != nullptr; }

  // Mask of the members that have not come, or had not come when it ended.
  uint64_t absent() const;
  // Mask of the processes in `gone` without which this cannot end.
  uint64_t Needs(uint64_t gone) const;
  // Says in its seat which absent members it lacks to end.
  void SayWhatItLacks() const;
  // Frees the seats of processes that have ended.
  void Abandon(uint64_t gone);

 private:
  enum class State { kJoining, kMoving, kDone };

  Outcome Finish(Status status);
  Outcome FinishWithPeersError();
  Outcome FinishRefused(Status refusal);
  Outcome StepInline();
  Outcome StepStreaming();
  uint64_t Lacks() const;
  bool SlotIsFree(size_t chunk) const;
  bool IsReady(const Read& read) const;
  void WriteChunk(const Stage& stage);
  void Write(const Stage& stage, char* to) const;
  void ReadChunks(const Read& read);
  void Perform(const Read& read) const;
  const char* At(const Source& source, int64_t piece_bytes) const;

  Arena* arena_ = nullptr;
  CrossingRequest request_;
  const StreamPlan* stream_ = nullptr;
  CallMoves moves_;
  State state_ = State::kDone;
  Status status_;
  bool failed_by_peer_ = false;
  uint64_t absent_at_end_ = 0;
  Crossing* crossing_ = nullptr;
  int channel_ = -1;
  size_t staged_ = 0;
  size_t read_ = 0;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_ARENA_TRANSFER_H_
