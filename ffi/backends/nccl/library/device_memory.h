// Device memory that NCCL and our engines hold.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_DEVICE_MEMORY_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_DEVICE_MEMORY_H_

#include <cstdint>

#include "ffi/backends/nccl/library/library.h"

namespace jaxcomm {

class Comms;
class NcclWorld;

// Returns the free bytes of a device.
int64_t FreeDeviceBytes(const NcclLibrary& library, cuda::Context context);

// Adds the device memory that NCCL accounts to a communicator. Returns false if NCCL
// says nothing.
bool AddDeviceBytes(const NcclLibrary& library, nccl::Comm comm, nccl::MemStat stat,
                    int64_t* bytes);

// Device memory of the ranks of a communicator that is split off a world.
class DeviceMemory {
 public:
  // `shares`: whether NCCL shares its resources with other communicators.
  DeviceMemory(const NcclWorld& world, const Comms& comms, bool shares)
      : world_(world), comms_(comms), shares_(shares) {}

  // To be called before and after NCCL makes the communicator.
  void Begin() { before_ = Measure(); }
  void End();

  // Bytes that NCCL holds for it. Where NCCL does not say: those it took at first.
  // Requires that it has not failed.
  int64_t Now() const;
  int64_t at_first() const { return at_first_; }

 private:
  struct Held {
    int64_t used = 0;       // by anybody, up to a constant
    int64_t accounted = 0;  // by NCCL to it, or to all that share with the mesh's
    bool is_accounted = false;
  };

  Held Measure() const;

  const NcclWorld& world_;
  const Comms& comms_;
  const bool shares_;
  Held before_;
  int64_t at_first_ = 0;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_DEVICE_MEMORY_H_
