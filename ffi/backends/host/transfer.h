// One process's part in one crossing: a state machine that never blocks.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_TRANSFER_H_
#define JAXCOMM_FFI_BACKENDS_HOST_TRANSFER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/backends/host/arena.h"
#include "ffi/backends/host/execute.h"
#include "ffi/backends/host/host_plan.h"
#include "ffi/backends/host/store.h"
#include "ffi/backends/host/stream_plan.h"
#include "ffi/base/status.h"

namespace jaxcomm {

class Transfer {
 public:
  // What to move, between buffers indexed by [rank][leaf]; those of ranks of other
  // processes are not looked at.
  struct Work {
    const HostPlan* plan = nullptr;
    const StreamPlan* stream = nullptr;
    const std::vector<Leaf>* leaves = nullptr;
    ReduceOp reduce = ReduceOp::kSum;
    GroupBuffers buffers = {};
  };

  void Begin(Arena* arena, const CrossingRequest& request, const Work& work);

  enum class Outcome { kIdle, kMoved, kDone };
  // Does what can be done now. One thread at a time.
  Outcome Step();
  // Ends the crossing for all its members; only between steps.
  void Fail(const Status& error);

  // How it ended.
  const Status& status() const { return status_; }
  const CrossingRequest& request() const { return request_; }

  // Whether it was another process that failed it; status() is then in its words.
  bool failed_by_peer() const { return failed_by_peer_; }
  // And before this process came.
  bool came_late() const { return came_late_; }

  // The members that have not come, as a mask; once it is done, those that had not.
  uint64_t absent() const;
  // Of the processes in `gone`, those without which this cannot end.
  uint64_t Needs(uint64_t gone) const;
  // Gives back the seats of processes that are no more.
  void Abandon(uint64_t gone);

 private:
  enum class State { kJoining, kMoving, kDone };

  Outcome Finish(Status status);
  Outcome FinishWithPeersError();
  Outcome StepInline();
  Outcome StepStreaming();
  bool SlotIsFree(size_t chunk) const;
  bool IsReady(const Read& read) const;
  void WriteChunk(const Stage& stage);
  void Write(const Stage& stage, char* to, const Store& into) const;
  void ReadChunks(const Read& read);
  int64_t Bytes(const Piece& piece) const;
  void Perform(const Read& read) const;
  const char* At(const Source& source, const Piece& piece) const;

  Arena* arena_ = nullptr;
  CrossingRequest request_;
  Work work_;
  State state_ = State::kDone;
  Status status_;
  bool failed_by_peer_ = false;
  bool came_late_ = false;
  uint64_t absent_at_end_ = 0;
  Crossing* crossing_ = nullptr;
  int channel_ = -1;
  size_t staged_ = 0;
  size_t read_ = 0;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_TRANSFER_H_
