// Collectives by NCCL.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_NCCL_ENGINE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_NCCL_ENGINE_H_

#include <atomic>
#include <deque>
#include <string>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/engines/engine.h"
#include "ffi/backends/nccl/engines/symmetric_memory.h"

namespace jaxcomm {

class NcclEngine final : public Engine {
 public:
  explicit NcclEngine(NcclParts& parts)
      : parts_(parts), registered_(parts.ranks.size()) {}

  Status Enqueue(const Call& call, const Recipe& recipe, LocalRank& rank,
                 cuda::Stream stream) override;
  // Gives `stream` steps. Requires the rank's launch lock.
  Status Run(const Steps& steps, const Call& call, LocalRank& rank,
             cuda::Stream stream);

  Status AsyncError(LocalRank& rank) override { return parts_.comms.AsyncError(rank); }
  void Abort(LocalRank& rank) override { parts_.comms.Abort(rank); }

  // Registers a segment with NCCL, once. Requires the launch locks of all ranks, and
  // every process of the communicator calls it. Returns how it is registered, on all
  // ranks here alike, or why it is not, which is no error. If other processes have it
  // otherwise, call Deregister().
  std::string Register(SymmetricMemory& memory);
  void Deregister(uint64_t segment);
  // Deregisters all. Requires that nobody calls.
  void ReleaseWindows();

  // Whether all operands and results lie in registered memory.
  bool IsSymmetric(const Call& call, LocalRank& rank);

 private:
  struct Registered {
    Windows windows;  // under the rank's launch lock
    // Whether there is one: most communicators have none, and take no lock to know it.
    std::atomic<bool> any{false};
  };

  // Deregisters it from a rank. Requires its launch lock.
  void Remove(const LocalRank& rank, uint64_t segment);
  // The same as IsSymmetric(). Requires the rank's launch lock.
  bool IsSymmetricLocked(const Call& call, const LocalRank& rank) const;
  // Whether NCCL can send between the places of operands and results: both ends of a
  // send must be registered, or none. Says why not.
  Status CheckPlaces(const Steps& steps, const Call& call, const LocalRank& rank) const;

  NcclParts& parts_;
  std::deque<Registered> registered_;  // by place
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_NCCL_ENGINE_H_
