// NCCL's communicators of the ranks of this process.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_COMMS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_COMMS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/failure/health.h"
#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/library/library.h"
#include "ffi/backends/nccl/queue/local_rank.h"
#include "ffi/base/status.h"

namespace jaxcomm {

// Waits until no operation on the communicators is in progress.
Status WaitUntilReady(const NcclLibrary& library, const std::vector<nccl::Comm>& comms,
                      const NcclPatience& patience, const char* what);

// Waits until the stream of the current device has done what it was given.
Status WaitForStream(const NcclLibrary& library, cuda::Stream stream,
                     const NcclPatience& patience, const char* what);

// Ends communicators in order with those of the other processes, or by force, for ten
// seconds at most, after which they are left as they are. NCCL frees memory here and
// waits for the device: the caller is not a thread that others depend on. `contexts`:
// of their devices, in the same order.
void EndComms(const NcclLibrary& library, const std::vector<nccl::Comm>& comms,
              const std::vector<cuda::Context>& contexts, bool abort);

// One for each rank, in the order of their places.
class Comms {
 public:
  static constexpr size_t kScratchBytes = 4096;

  Comms(const NcclLibrary& library, const Health& health, const LocalRanks& ranks,
        NcclPatience patience);
  // How long to wait for the other processes.
  const NcclPatience& patience() const { return patience_; }

  // Makes and frees the scratch memory.
  Status Prepare();
  void Release();

  // Null in a group of one, and once it was aborted.
  nccl::Comm comm(size_t place) const { return items_[place].comm; }
  // Some device memory of a rank, for whoever has its launch lock.
  cuda::Pointer scratch(size_t place) const { return items_[place].scratch; }

  void Set(const std::vector<nccl::Comm>& comms);
  // Connects neighbors of the ring, and returns once all ranks did: a rank that
  // allocates while the kernel of another waits for it may wait for that kernel.
  Status Connect();
  // Has NCCL do something on each rank that has a communicator, as a group, and waits
  // until it is done.
  Status InGroup(const char* what,
                 const std::function<nccl::Result(LocalRank&, nccl::Comm)>& call);
  // Waits until a call that NCCL has in progress is over: it connects to a rank at the
  // first use, which needs that rank's process.
  Status Finish(nccl::Result result, nccl::Comm comm, const char* what,
                double seconds) const;
  // Waits for the ranks' own streams.
  Status WaitForStreams();

  // Returns the error that NCCL reports in the background, also of a rank that has
  // nothing in flight: others may wait for it, and NCCL tells them nothing. It is not
  // asked while the rank's group has nothing in flight, or a thread is launching.
  Status AsyncError(LocalRank& rank);
  // Aborts a rank's communicator, which waits for the device. The rank has none then.
  void Abort(LocalRank& rank);
  // Ends all, see EndComms().
  void End(bool by_force);

  size_t size() const { return items_.size(); }
  // Adds the device memory of the ranks. Returns how many it is of: a rank counts if
  // NCCL knows its memory, and no thread is launching.
  size_t AddBytes(nccl::MemStat stat, int64_t* bytes) const;

 private:
  struct Item {
    std::atomic<nccl::Comm> comm{nullptr};  // load it once and check
    cuda::Pointer scratch = 0;
  };

  // Of the ranks, in their order.
  std::vector<cuda::Context> contexts() const;

  const NcclLibrary& library_;
  const Health& health_;
  const LocalRanks& ranks_;
  const NcclPatience patience_;
  std::deque<Item> items_;
};

// What the engines of a communicator work with. It outlives them.
struct NcclParts {
  // `spec` and `library` must outlive it.
  NcclParts(const CommunicatorSpec& spec, const NcclLibrary& library,
            Health::Policy policy, const std::vector<NcclDevice>& devices,
            const PrimaryContexts& contexts, FlightRecorder& recorder,
            NcclPatience patience)
      : spec(spec),
        library(library),
        ranks(MakeRanks(library, spec, devices, contexts, recorder, health)),
        health(spec, std::move(policy), ranks),
        comms(library, health, ranks, std::move(patience)) {}

  const CommunicatorSpec& spec;
  const NcclLibrary& library;
  const LocalRanks ranks;
  Health health;  // ends first: others look whether it is busy
  Comms comms;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_COMMS_H_
