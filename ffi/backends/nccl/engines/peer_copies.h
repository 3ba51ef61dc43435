// Collectives that only move bytes, between the devices of one process, by their copy
// engines.
//
// NCCL moves bytes with thread blocks, which computation lacks meanwhile, also while
// they wait for a rank that is late; and a copy engine is faster where there is much to
// move. A rank tells the others here where its operands and results lie, and who comes
// last enqueues copies from the memory of one device to that of another. So no device
// waits for what is not enqueued yet. Nor does a rank wait here for long: XLA ends the
// process where one device's program could not be launched and another's launch does
// not return. What a rank sends that is not sent by then is left to NCCL, by it and by
// all that it sends to.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_PEER_COPIES_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_PEER_COPIES_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "ffi/backends/nccl/library/library.h"
#include "ffi/backends/nccl/plans/peer_plan.h"
#include "ffi/backends/nccl/plans/steps.h"
#include "ffi/backends/nccl/queue/in_flight.h"
#include "ffi/core/communicator.h"
#include "ffi/core/rendezvous.h"
#include "ffi/flight/flight_recorder.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

// What tells a begun collective from others of its rank: its first result that has
// elements, since those without may share an address. Null if none has.
const void* MarkOf(const Call& call);

class PeerCopies {
 public:
  // Members: all ranks of all groups. Null if none takes part.
  static ErrorOr<std::unique_ptr<PeerCopies>> Create(
      const NcclLibrary& library, FlightRecorder& recorder,
      const std::vector<RankFacts>& members);
  ~PeerCopies();

  // Whether the devices of the member's group reach each other's memory.
  bool takes_part(size_t member) const { return devices_[member]->takes_part; }

  // A rank's part, from when `ready` has come so far. Its copies are given to `on`, or
  // to a stream of the member's own if that is null. FAILED_PRECONDITION, here and
  // below, is of this call alone; another failure is all ranks'.
  Status Start(const Call& call, std::shared_ptr<const PeerPlan> plan, size_t member,
               cuda::Stream ready, cuda::Stream on, const InFlight::Named& named);

  // What of a rank's part is left to NCCL.
  struct LeftToNccl {
    Steps steps;
    std::vector<const void*> operands;
    std::vector<void*> results;
    InFlight::Named named;

    bool is_empty() const { return steps.local.empty() && steps.grouped.empty(); }
  };

  // Waits on the host until the ranks that this one sends to or receives from have
  // started, or as long as it may, and has `stream` wait for the copies. `*is_begun`:
  // whether the member began what has this mark.
  Status Done(const void* mark, size_t member, cuda::Stream stream,
              double patience_seconds, bool* is_begun, LeftToNccl* left);

  // Drops what has this mark and has no end any more: its program failed in between.
  // `stream`, which is to write there now, waits for the copies. Fails if NCCL has been
  // left something of it that others wait for.
  Status Forget(const void* mark, size_t member, cuda::Stream stream);
  // Likewise, all that the member began in other runs.
  Status ForgetEarlierRuns(int64_t run, size_t member, cuda::Stream stream);

  // Ends all waits, and refuses what comes.
  void Fail(const Status& reason);

  // What is given to the member's streams.
  InFlight& in_flight(size_t member) { return devices_[member]->in_flight; }

 private:
  struct Device {
    Device(const NcclLibrary& library, FlightRecorder& recorder, const RankFacts& of)
        : member(of), in_flight(library, recorder) {}
    const RankFacts member;
    bool takes_part = false;
    cuda::Stream stream = nullptr;
    InFlight in_flight;
    // A run in which somebody was late: waiting again would add up.
    std::optional<int64_t> late_run;
  };

  // A rank's part in a round.
  struct Participant {
    // What becomes of what the rank sends: once it is one, it never is another.
    enum class Sends { kUndecided, kCopied, kLeftToNccl };

    size_t device = 0;
    bool is_here = false, is_over = false;
    Sends sends = Sends::kUndecided;
    bool has_left = false;  // `left` was recorded: copies are, or may be, on their way
    const void* mark = nullptr;
    std::vector<const void*> operands;
    std::vector<void*> results;
    cuda::Stream stream = nullptr;
    cuda::Event ready = nullptr;  // its operands are there, and its results free
    cuda::Event left = nullptr;   // what it sends has arrived
    cuda::Event stays = nullptr;  // and what it keeps, if that goes on another stream
    InFlight::Named named;

    bool has_come() const { return is_here; }
    bool is_decided() const { return sends != Sends::kUndecided; }
  };

  // One operation of one group.
  struct Round : RoundOf<Participant> {
    int group = 0;
    std::shared_ptr<const PeerPlan> plan;
  };

  PeerCopies(const NcclLibrary& library, FlightRecorder& recorder)
      : library_(library), recorder_(recorder) {}

  // The round that a rank comes to.
  ErrorOr<Round*> Join(const Call& call, const RankFacts& member) REQUIRES(mutex_);
  void DestroyEvents(const Round& round);
  ErrorOr<std::unique_ptr<Round>> MakeRound(const RankFacts& member);
  // The last that the member began and did not end, with this mark, or in another run;
  // null if there is none.
  Round* FindBegun(const void* mark, const RankFacts& member) REQUIRES(mutex_);
  Round* FindBegunBefore(int64_t run, const RankFacts& member) REQUIRES(mutex_);
  template <typename Is>
  Round* FindBegunIf(const RankFacts& member, const Is& is) REQUIRES(mutex_);
  Status SendIfAllAreHere(Round& round, int rank) REQUIRES(mutex_);
  Status Send(Round& round, int rank) REQUIRES(mutex_);
  Status WaitFor(cuda::Stream stream, cuda::Event event);
  // Has `stream` wait for all copies from and to the rank that were enqueued.
  Status WaitForCopies(const Round& round, int rank, cuda::Stream stream);
  // Whether it is known how all that the rank sends and receives goes.
  static bool IsDecided(const Round& round, int rank);
  // FAILED_PRECONDITION if a rank went on that this one sends to or receives from: its
  // program failed between a collective's beginning and its end.
  static Status CheckPeers(const Round& round, int rank);
  // Ends all if others have given NCCL their part of what this rank drops.
  Status FailIfOwed(const Round& round, int rank) REQUIRES(mutex_);
  static LeftToNccl LeftOf(const Round& round, int rank);
  // Tells the recorder; what is sent is watched.
  void FailUnlessDecided(const Participant& participant);
  void Leave(Round& round, int rank) REQUIRES(mutex_);
  Status ForgetLocked(const void* mark, const Device& device, cuda::Stream stream)
      REQUIRES(mutex_);
  Status ForgetLocked(Round& begun, const Device& device, cuda::Stream stream)
      REQUIRES(mutex_);
  void FailLocked(const Status& reason) REQUIRES(mutex_);

  const NcclLibrary& library_;
  FlightRecorder& recorder_;
  std::vector<std::unique_ptr<Device>> devices_;
  Mutex mutex_;
  ConditionVariable changed_;
  Status failure_ GUARDED_BY(mutex_) = OkStatus();
  std::deque<Rendezvous<Round>> groups_ GUARDED_BY(mutex_);
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_PEER_COPIES_H_
