// A communicator of NVIDIA GPUs: the ranks of this process, and the engines that carry
// out their calls.
//
// Its parts: engines/ carry out calls, as plans/ say; queue/ gives a rank's calls to
// streams and follows them; failure/ says whether calls are taken, and ends the
// communicator; comms.h has NCCL's communicators; call_check.h compares calls.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ffi/backends/nccl/call_check.h"
#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/engines/engines.h"
#include "ffi/backends/nccl/engines/symmetric_memory.h"
#include "ffi/backends/nccl/failure/health.h"
#include "ffi/backends/nccl/library/device_memory.h"
#include "ffi/backends/nccl/queue/local_rank.h"
#include "ffi/backends/nccl/world.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

struct NcclSpec {
  std::shared_ptr<NcclWorld> world;
  NcclSettings settings;
  NcclPatience patience;
  EnginePolicy engines;
  OnFailure on_failure = OnFailure::kRaise;
  // Whether ranks compare what they call before each call.
  bool check = false;
};

// What this backend alone counts and knows.
struct NcclStats {
  int64_t symmetric_calls = 0;     // with all buffers in symmetric memory
  int64_t copied_calls = 0;        // done by copy engines
  int64_t one_shot_calls = 0;      // done by our kernel instead of NCCL
  int64_t device_sized_calls = 0;  // whose sizes no host read
  // Whether that kernel does small sums, "yes" or "no: " and why.
  std::string one_shot;
  // Likewise whether copy engines move what only moves.
  std::string copies;
  // Likewise whether GPUs read the sizes of ragged_all_to_all themselves.
  std::string device_sizes;
};

class NcclCommunicator final : public Communicator,
                               public std::enable_shared_from_this<NcclCommunicator> {
 public:
  NcclCommunicator(CommunicatorSpec spec, NcclSpec how);
  ~NcclCommunicator() override;

  // Makes it with the other processes, connects its ranks and waits for all of them.
  Status Make();

  Status Enqueue(const Call& call, void* stream) override;
  Status EnqueueStart(const Call& call, void* stream) override;
  Status EnqueueDone(const Call& call, void* stream) override;
  void Abort(const Status& reason) override;
  CommunicatorStats stats() const override;
  NcclStats nccl_stats() const;

  // For a program that has collectives whose moves depend on numbers of devices.
  // Where the communicator takes no calls, they say so.
  Status PrepareDataDependent() {
    return parts_.health.Refusal().failure() ? OkStatus()
                                             : engines_.PrepareDataDependent();
  }

  // Registers a segment with NCCL, once; every process of the communicator calls it.
  // Says how it is registered, or why NCCL refused, which is no error.
  ErrorOr<std::string> Register(const std::shared_ptr<SymmetricMemory>& memory);
  void Deregister(const SymmetricMemory& memory) {
    engines_.nccl().Deregister(memory.segment());
  }

 private:
  Status PrepareRanks();
  // Has NCCL make the communicators of the ranks, and connects them.
  Status Split();
  Status Connect();
  // Finds the rank of a call that came for `stream`, once the rank may make it.
  ErrorOr<LocalRank*> FindRank(const Call& call, cuda::Stream stream);
  Status EnqueueOf(const Call& call, LocalRank& rank, cuda::Stream stream);
  Status Compare(const Call& call, LocalRank& rank);
  Status StartOf(const Call& call, LocalRank& rank, cuda::Stream stream);
  // Fails the communicator with an error of a library, for which others would wait.
  Status FailIfOfLibrary(const Call& call, const LocalRank& rank, const Status& status);
  // Has `stream` wait for what a run has started whose program fails with this call.
  static Status EndRunIfFailed(const Call& call, LocalRank& rank, cuda::Stream stream,
                               Status status);
  // See patience.h.
  Status RunPatiently(const char* what, std::function<Status()> call);

  const NcclSpec how_;
  NcclParts parts_;
  Engines engines_;
  DeviceMemory memory_;
  std::unique_ptr<CallCheck> check_;  // null where ranks do not compare calls
};

// Makes a communicator: see NcclCommunicator::Make(). Groups of one get no communicator
// of NCCL's.
ErrorOr<std::shared_ptr<Communicator>> MakeNcclCommunicator(CommunicatorSpec spec,
                                                            NcclSpec how);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_
