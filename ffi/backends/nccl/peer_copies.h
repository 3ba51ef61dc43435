// Collectives that only move bytes, between the devices of one process, by their copy
// engines.
//
// NCCL moves bytes with thread blocks, which computation lacks meanwhile, also while
// they wait for a rank that is late; and a copy engine is faster where there is much to
// move. A rank tells the others here where its operands and results lie, and who comes
// last enqueues copies from the memory of one device to that of another. So no device
// waits for what is not enqueued yet: where a rank does not come, the others raise on
// the host.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_PEER_COPIES_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_PEER_COPIES_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/backends/nccl/in_flight.h"
#include "ffi/backends/nccl/library.h"
#include "ffi/backends/nccl/peer_plan.h"
#include "ffi/communicator.h"
#include "ffi/flight_recorder.h"

namespace jaxcomm {

class PeerCopies {
 public:
  struct Member {
    int group = 0, rank = 0, size = 0;
    int ordinal = 0;
    cuda::Context context = nullptr;
  };

  // How the watch knows an operation.
  struct Named {
    FlightRecorder::Ticket ticket = 0;
    uint32_t operation = 0;
    uint64_t sequence = 0;
  };

  // Members: all ranks of all groups. Null where a device cannot reach another's
  // memory.
  static Status Create(const NcclLibrary& library, FlightRecorder& recorder,
                       const std::vector<Member>& members,
                       std::unique_ptr<PeerCopies>* copies);
  ~PeerCopies();

  // A rank's part, from when `ready` has come so far. Its copies are given to `on`, or
  // to a stream of the member's own if that is null.
  Status Start(const Call& call, std::shared_ptr<const PeerPlan> plan, size_t member,
               cuda::Stream ready, cuda::Stream on, const Named& named);

  // Waits on the host until the ranks that this one sends to or receives from have
  // started, and has `stream` wait for the copies. `*is_begun`: whether the member
  // began what gives its first result here.
  Status Done(const void* result, size_t member, cuda::Stream stream,
              double timeout_seconds, bool* is_begun);

  // Ends all waits, and refuses what comes.
  void Fail(const Status& reason);

  // What is given to the member's streams.
  InFlight& in_flight(size_t member) { return lanes_[member]->in_flight; }

 private:
  struct Lane {
    Lane(const NcclLibrary& library, FlightRecorder& recorder, const Member& of)
        : member(of), in_flight(library, recorder) {}
    const Member member;
    cuda::Stream stream = nullptr;
    InFlight in_flight;
  };

  // A rank's part of a meeting.
  struct Seat {
    size_t lane = 0;
    bool is_here = false, is_sent = false, is_over = false;
    std::vector<const void*> operands;
    std::vector<void*> results;
    cuda::Stream stream = nullptr;
    cuda::Event ready = nullptr;  // its operands are there, and its results free
    cuda::Event left = nullptr;   // what it sends has arrived
    Named named;
  };

  // One operation of one group. Kept to be used again.
  struct Meeting {
    int64_t run_id = 0;
    uint64_t tag = 0;
    int group = 0;
    std::shared_ptr<const PeerPlan> plan;
    std::vector<Seat> seats;  // by rank
  };

  PeerCopies(const NcclLibrary& library, FlightRecorder& recorder)
      : library_(library), recorder_(recorder) {}

  Status Open(const Call& call, const Member& member, Meeting** meeting);
  // The last that gives this result; null if there is none.
  Meeting* Find(const void* result, const Member& member);
  Status SendIfAllAreHere(Meeting& meeting, int rank);
  Status Send(const Meeting& meeting, int rank);
  Status WaitFor(cuda::Stream stream, cuda::Event event);
  // The ranks that this one waits for, in words.
  static std::string Missing(const Meeting& meeting, int rank);
  // Tells the recorder; what is sent is watched.
  void FailUnlessSent(const Seat& seat);
  void Leave(Meeting& meeting, int rank);

  const NcclLibrary& library_;
  FlightRecorder& recorder_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Status failure_ = OkStatus();
  std::vector<std::unique_ptr<Meeting>> open_, spare_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_PEER_COPIES_H_
