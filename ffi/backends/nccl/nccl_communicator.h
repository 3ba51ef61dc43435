// A communicator of NVIDIA GPUs: this process's ranks, each with NCCL's communicator.
//
// Its parts: creation.cc makes it, launch.cc gives a stream the NCCL calls of a
// collective, or the kernel of one_shot.h where that is faster, halves.cc does so in
// two halves, copies.cc leaves it to copy engines where they are faster, windows.cc
// registers symmetric memory, suspend.cc gives memory back for a while, check.cc
// compares calls, failure.cc watches over it and ends it where it fails, and
// nccl_communicator.cc does the rest.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/call_counts.h"
#include "ffi/backends/nccl/device_stop.h"
#include "ffi/backends/nccl/in_flight.h"
#include "ffi/backends/nccl/kernels/device_kernels.h"
#include "ffi/backends/nccl/one_shot.h"
#include "ffi/backends/nccl/peer_copies.h"
#include "ffi/backends/nccl/steps.h"
#include "ffi/backends/nccl/symmetric_memory.h"
#include "ffi/backends/nccl/world.h"
#include "ffi/core/communicator.h"
#include "ffi/core/watchdog.h"

namespace jaxcomm {

struct NcclSpec {
  std::shared_ptr<NcclWorld> world;
  NcclSettings settings;
  NcclPatience patience;
  // Whether copy engines may move bytes, where all ranks are of this process.
  bool copy_engines = false;
  // Whether small sums may go by a kernel of ours, where all ranks are of this host.
  bool one_shot = false;
  OnFailure on_failure = OnFailure::kRaise;
  // Whether ranks compare what they call before each call.
  bool check = false;
};

// Makes the communicator with the other processes, connects its ranks and waits for
// all of them. Groups of one get no communicator of NCCL's.
Status MakeNcclCommunicator(CommunicatorSpec spec, NcclSpec how,
                            std::shared_ptr<Communicator>* communicator);

class NcclCommunicator final : public Communicator,
                               public Watched,
                               public NcclWorld::Sharer,
                               public SymmetricMemory::Registrar {
 public:
  NcclCommunicator(CommunicatorSpec spec, NcclSpec how);
  ~NcclCommunicator() override;

  cuda::Context any_context() const { return how_.world->context(0); }

  // With the other processes.
  Status Make();

  Status Enqueue(const Call& call, void* stream) override {
    Rank* const rank = ByOrdinal(call.device_id);
    if (rank == nullptr) return NotMine(call);
    if (rank->call_cards != nullptr) {
      if (Status status = CompareCalls(call, *rank); status.failure()) return status;
    }
    if (auto plan = CopiesFor(call, *rank)) {
      return Copy(call, std::move(plan), *rank, stream);
    }
    return Launch(call, *rank, stream);
  }

  Status EnqueueStart(const Call& call, void* stream) override;
  Status EnqueueDone(const Call& call, void* stream) override;

  // For CPU devices, which a test double serves.
  xla::ffi::Future Execute(const Call& call) override;

  void Abort(const Status& reason) override;
  CommunicatorStats stats() const override;

  // Registers a segment with NCCL, once; every process of the communicator calls it.
  // Says how it is registered, or why NCCL refused, which is no error.
  Status Register(const std::shared_ptr<SymmetricMemory>& memory, std::string* how);

  // Gives device memory back until Resume(), where NCCL can; every process calls them.
  // Operations in between fail.
  Status Suspend();
  Status Resume();

  // Fails because something did elsewhere: another process says so.
  void FailElsewhere(const std::string& reason);

  // Watched:
  bool Poll() override;
  double poll_seconds() const override;
  const char* stuck_text() const override { return kDriverStuck; }
  // NcclWorld::Sharer:
  void FailToo(const Status& reason) override { SetFailure(reason, /*names=*/false); }
  bool is_busy() override;
  std::string FirstOperation() override;

  // To be called once it is made.
  Status BeWatched();
  // SymmetricMemory::Registrar:
  void Deregister(uint64_t segment) override;

 private:
  struct CallCard;

  struct Rank {
    Rank(const NcclLibrary& library, FlightRecorder& recorder)
        : in_flight(library, recorder) {}

    int group = 0, rank = 0, size = 0;
    size_t place = 0;    // among the local devices
    int64_t device = 0;  // global id
    int ordinal = 0;
    cuda::Context context = nullptr;
    // Null in a group of one, and once it was aborted: load it once and check.
    std::atomic<nccl::Comm> comm{nullptr};
    std::shared_ptr<const DeviceKernels> kernels;
    cuda::Stream stream = nullptr;
    cuda::Pointer scratch = 0;
    // Collectives begun and not ended, by their MarkOf(); and events of those that are,
    // to be used again.
    std::mutex halves_mutex;
    std::vector<std::pair<const void*, cuda::Event>> begun;
    std::vector<cuda::Event> spare_events;
    // Held while the communicator is given work: NCCL wants one thread at a time.
    std::timed_mutex launching;
    Windows windows;  // likewise
    // Where ranks compare their calls: this rank's, then everybody's.
    CallCard* call_cards = nullptr;
    cuda::Pointer call_cards_on_device = 0;
    uint64_t compared = 0;
    std::atomic<uint64_t> operations{0};  // given to it
    InFlight in_flight;
    CallCounts counts;
  };

  // Counts a rank as on its way while this lives: it may wait for others.
  class Counted {
   public:
    explicit Counted(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
    ~Counted() { count_.fetch_sub(1); }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

   private:
    std::atomic<int>& count_;
  };

  using Clock = InFlight::Clock;
  static Clock::duration Seconds(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(seconds));
  }

  // Device memory of its ranks.
  struct Held {
    int64_t used = 0;  // by anybody, up to a constant
    int64_t told = 0;  // by it, or by all that share with the mesh's
    bool is_told = false;
  };

  bool shares_memory() const {
    const auto found = how_.settings.numbers.find("splitShare");
    return found != how_.settings.numbers.end() && found->second == 1;
  }
  Held MeasureHeld() const;
  Status MakeRanks();
  // What stops devices, and what is done without NCCL.
  Status MakeShortcuts();
  // What ranks compare their calls by, if they are to.
  Status MakeCallCards();
  // Waits until all ranks of the group have come to a call. Fails on all of them, and
  // ends the communicator, if it is not the same call.
  Status CompareCalls(const Call& call, Rank& rank);
  Status ExchangeCallCards(const Call& call, Rank& rank);
  Status FindOddRanks(const Rank& rank) const;
  Status SplitOff();
  Status WarmUp();
  // Connects neighbors of the ring, and returns once all ranks did: a rank that
  // allocates while the kernel of another waits for it may wait for that kernel.
  Status Connect();
  // Has NCCL do something on each rank that has a communicator, as a group.
  Status InGroup(const std::function<nccl::Result(Rank&)>& call);
  Status WaitForStreams();
  // With the other processes: see OneShot::Card.
  Status ShareInboxes();
  Status ExchangeCards(const std::vector<Rank*>& asked);
  Status Launch(const Call& call, Rank& rank, cuda::Stream stream);
  // Gives `stream` an operation by give_it(), and has the watch follow it. Without a
  // sequence number it gets the rank's next.
  template <typename GiveIt>
  Status Give(const Call& call, Rank& rank, cuda::Stream stream, InFlight::Named named,
              const GiveIt& give_it);
  Status Suspended(const Call& call) const;
  // Ends the communicator, since a call could not be given to its stream.
  Status Ended(const Call& call, const Rank& rank, ErrorCode code,
               std::string_view reason);
  // Why it failed, to who calls it; OkStatus() if it did not.
  Status FailureOf(const Call& call, const Rank& rank) const;
  // How a call goes by copy engines; null where NCCL is to do it.
  std::shared_ptr<const PeerPlan> CopiesFor(const Call& call, Rank& rank);
  Status Copy(const Call& call, std::shared_ptr<const PeerPlan> plan, Rank& rank,
              cuda::Stream stream);
  Status StartCopies(const Call& call, std::shared_ptr<const PeerPlan> plan, Rank& rank,
                     cuda::Stream ready, cuda::Stream on);
  // `*is_begun`: whether StartCopies() was called for it.
  Status DoneCopies(const Call& call, Rank& rank, cuda::Stream stream, bool* is_begun);
  // Gives NCCL what was too late for copies.
  Status LaunchRest(const PeerCopies::Rest& rest, const Call& call, Rank& rank,
                    cuda::Stream stream);
  Status FailedCopies(const Call& call, const Rank& rank, const Status& status);
  Status Run(const Steps& steps, const Call& call, Rank& rank, cuda::Stream stream);
  Status Barrier(Rank& rank, cuda::Stream stream);
  // Has NCCL do what it waits for the other processes in, on a thread of its own: until
  // the deadline, or Ctrl-C, which end the communicator.
  Status Patiently(const char* what, std::function<Status(NcclCommunicator&)> call);
  // The locks of all ranks, each of which is let in to what the others wait for;
  // nothing is on its way then if it `is_idle`. Where the communicator fails, fewer.
  std::vector<std::unique_lock<std::timed_mutex>> LockAll(bool is_idle);
  Status SuspendNow(bool suspend);
  Status RegisterNow(SymmetricMemory& memory, std::string* how);
  // Whether all operands and results lie in registered memory.
  bool IsSymmetric(const Call& call, const Rank& rank) const;
  // Whether NCCL can send between the places of operands and results: both ends of a
  // send are to be registered, or none. Says why not.
  Status CheckPlaces(const Steps& steps, const Call& call, const Rank& rank) const;
  Status Settle(nccl::Result result, Rank& rank, const char* what);
  std::string Describe(const Rank& rank, const InFlight::Overdue& operation) const {
    return jaxcomm::Describe(operation, spec(), rank.rank, rank.size, rank.device);
  }
  // Ends it if a process that it needs has ended. True if it did, or is about to.
  bool LosePeers();
  // Whether nothing is on its way any more, in some milliseconds.
  bool IsIdleSoon();
  // Refuses every call from now on. False if it does so already. `names`: whether the
  // reason names a call, as the text that a call raises has to.
  bool Refuse(const Status& reason, bool names);
  // The same because something failed, so that NCCL's part cannot end in order.
  bool SetFailure(const Status& reason, bool names);
  // Fails it and those that share with it, and sees to it that no result of what is on
  // its way is read. `reason` says what happened; what that means is added to it.
  // `dump`: of the flight record that is written if something was; null: none.
  void Fail(const Status& reason, bool names = true, const char* dump = nullptr) {
    Fail(reason, names, dump, how_.on_failure);
  }
  void Fail(const Status& reason, bool names, const char* dump, OnFailure how);
  // The same for what hangs in NCCL before an operation of a program uses it.
  void FailStuck(const Status& reason);
  // Whether it or one that shares with it is busy.
  bool AnyBusy();
  // Whether a graph of XLA's has an operation of it.
  bool was_captured() const;
  // Whether an operation is on its way, as far as is known of graphs.
  bool has_work() const { return num_giving_ > 0 || InFlightCount() > 0; }
  // On a thread of its own: NCCL frees memory, which waits for the device.
  void AbortElsewhere();
  // Gives `stream` what fills the results with ones if it was poisoned by then.
  Status GivePoison(const Call& call, const Rank& rank, cuda::Stream stream);
  // Lets calls that a test double holds back see the failure.
  void Abandon() {
    if (library_.test_double == nullptr) return;
    library_.test_double->abandon(how_.world.get(), this);
  }

  int64_t InFlightCount() const {
    int64_t count = 0;
    for (const auto& rank : ranks_) {
      count += rank->in_flight.size();
      if (copies_ != nullptr) count += copies_->in_flight(rank->place).size();
    }
    return count + num_copying_.load(std::memory_order_relaxed);
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status failure() const {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    return failure_;
  }
  // Why a call is refused; OkStatus() if it is not.
  Status Refusal() const {
    if (failed()) return failure();
    return DevicesAreStopped() ? DevicesStoppedError() : OkStatus();
  }
  Rank* ByOrdinal(int64_t ordinal) {
    for (auto& rank : ranks_) {
      if (rank->ordinal == ordinal) return rank.get();
    }
    return nullptr;
  }
  Status Refused(const Call& call, std::string_view reason) const {
    return FailedPrecondition(call.site->description(), " (lane '", spec().lane,
                              "'): ", reason);
  }
  Status NotMine(const Call& call) const {
    return FailedPrecondition(call.site->description(), ": device ", call.device_id,
                              " is not in the communicator it was compiled for");
  }

  // As NCCL tells it, else what was taken when it was made.
  int64_t DeviceBytesNow() const;

  const NcclSpec how_;
  const NcclLibrary& library_;
  const uint64_t number_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // of this process
  std::unique_ptr<PeerCopies> copies_;        // null where NCCL moves all
  std::unique_ptr<OneShot> one_shot_;         // null where NCCL adds all
  std::atomic<int> num_copying_{0};           // ranks in copies.cc
  std::atomic<int> num_giving_{0};            // ranks that give a stream an operation
  int64_t device_bytes_ = 0;

  std::atomic<bool> failed_{false};
  std::atomic<bool> is_broken_{false};  // NCCL's part cannot end in order
  std::atomic<bool> is_suspended_{false};
  // Of pinned host memory, where the policy is to poison: not 0 once it failed.
  uint32_t* poisoned_ = nullptr;
  std::mutex polling_;
  // When a process of ours was first seen to be gone, or an error of NCCL's, which may
  // be of the same cause. Under `polling_`.
  Clock::time_point peer_lost_, error_seen_;
  mutable std::mutex failure_mutex_;
  Status failure_ = OkStatus();
  bool failed_between_calls_ = false;  // so that it names none
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_
