// One rank's side of a communicator, and the buffers that it was told of.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_COMMUNICATOR_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_COMMUNICATOR_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <thread>

#include "tests/doubles/nccl/failed.h"
#include "tests/doubles/nccl/room.h"

namespace jaxcomm::fake {

// What a family of communicators made by splitShare=1 has in common on one rank: their
// launches run one after the other, in the order of the calls, and an abort of one
// aborts all.
class Resources {
 public:
  uint64_t TakeTicket();
  // False: aborted.
  bool WaitForTurn(uint64_t ticket);
  void EndTurn(uint64_t ticket);
  void Abort();
  bool aborted() const { return aborted_; }

  // What the family holds of its device's memory: NCCL counts it together.
  void Count(int64_t more);
  int64_t bytes();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t next_ = 0;
  uint64_t turn_ = 0;
  std::atomic<bool> aborted_{false};
  int64_t bytes_ = 0;
};

struct Communicator {
  // Set before others see it, or by the job that makes it.
  int64_t number = 0;  // its handle, as the trace names it
  int rank = 0;
  int size = 0;
  int device = 0;
  nccl::Config config;
  std::shared_ptr<Room> room;
  std::shared_ptr<Resources> resources;
  bool shares = false;  // its parent's resources
  // While it is being split off: its parent's, whose abort ends that.
  std::shared_ptr<Resources> splitting_from;
  uint64_t collectives = 0;
  uint64_t meetings = 0;

  // What makes a non-blocking one, or finalizes it. Joined by destroy and abort.
  std::thread job;

  std::atomic<bool> finalized{false};
  // Operations must end now.
  bool Stopped() const {
    return resources->aborted() ||
           (splitting_from != nullptr && splitting_from->aborted());
  }

  std::mutex mutex;
  std::condition_variable changed;
  // The rest belongs to the mutex.
  nccl::Result state = nccl::kInProgress;
  std::string error;
  int64_t outstanding = 0;  // launches enqueued and not over
  int64_t running = 0;      // launches that streams are at now
  uint64_t graph = 0;       // the last that it is part of
  int64_t bytes = 0;

  void SetState(nccl::Result result, const std::string& text);
  // Takes the memory that it holds until it is destroyed.
  nccl::Result Occupy();
  void Vacate();
};

Handles<nccl::Comm, Communicator>& Communicators();

// The asynchronous error, with its text: of this rank or of all; kInProgress.
nccl::Result AsyncError(Communicator* communicator, std::string* text);

// Finds a communicator that operations can be called on, or says why there is none.
nccl::Result FindReady(nccl::Comm comm, std::shared_ptr<Communicator>* communicator);

// The same, in a function whose result it is if there is none.
#define JAXCOMM_FAKE_FIND(name, comm)                                                \
  std::shared_ptr<::jaxcomm::fake::Communicator> name;                               \
  if (const auto found = ::jaxcomm::fake::FindReady(comm, &name); found != kSuccess) \
  return ::jaxcomm::fake::Spoil(found)

// A call that failed within a group makes its end fail. Returns `result`.
nccl::Result Spoil(nccl::Result result);

// Says in the trace that memory was freed that a communicator still has registered.
void TraceIfRegistered(const void* data, size_t bytes);

// What ncclCommDestroy and ncclCommAbort do with what nobody deregistered.
void DropRegistrations(Communicator* communicator);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_COMMUNICATOR_H_
