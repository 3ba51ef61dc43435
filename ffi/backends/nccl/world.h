// The communicator of all devices of a mesh, of which others are split off.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_WORLD_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_WORLD_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/failure/world_health.h"
#include "ffi/backends/nccl/library/library.h"
#include "ffi/backends/nccl/library/primary_contexts.h"
#include "ffi/backends/nccl/library/settings.h"
#include "ffi/base/status.h"
#include "ffi/os/peer_watch.h"

namespace jaxcomm {

class NcclWorld : public std::enable_shared_from_this<NcclWorld> {
 public:
  // Joins the `size` ranks that know `unique_id`; every process calls it.
  // `peers`: those of the other processes whose end this one can see.
  static ErrorOr<std::shared_ptr<NcclWorld>> Create(
      const NcclLibrary& library, int size, std::vector<NcclDevice> devices,
      const std::string& unique_id, const NcclSettings& settings, NcclPatience patience,
      std::vector<Peer> peers);
  ~NcclWorld();

  // Splits off communicators, one for each of the local devices: those of a color
  // belong together, in the order of their keys; null where the color is
  // nccl::kNoColor. Every process calls it.
  ErrorOr<std::vector<nccl::Comm>> Split(const std::vector<int>& colors,
                                         const std::vector<int>& keys,
                                         const NcclSettings& settings,
                                         NcclPatience patience);

  // Shared by its communicators, which fail together.
  const std::shared_ptr<WorldHealth>& health() const { return health_; }
  bool is_broken() const { return health_->is_broken(); }
  const NcclLibrary& library() const { return library_; }
  const std::vector<NcclDevice>& devices() const { return devices_; }
  const PrimaryContexts& contexts() const { return contexts_; }
  // Device memory that it took, in bytes, on all local devices.
  int64_t device_bytes() const { return device_bytes_; }
  // Adds what it and those that share with it hold now. Returns false if NCCL says
  // nothing.
  bool AddDeviceBytes(int64_t* bytes) const;

 private:
  NcclWorld(const NcclLibrary& library, int size, std::vector<NcclDevice> devices)
      : library_(library),
        devices_(std::move(devices)),
        contexts_(library, devices_),
        health_(
            std::make_shared<WorldHealth>(/*spans_processes=*/
                                          static_cast<int>(devices_.size()) < size)) {}

  const NcclLibrary& library_;
  const std::vector<NcclDevice> devices_;
  const PrimaryContexts contexts_;
  std::vector<nccl::Comm> comms_;
  // The targets of splits that failed: NCCL may still write communicators here, until
  // the world's own end.
  std::vector<std::unique_ptr<std::vector<nccl::Comm>>> abandoned_;
  int64_t device_bytes_ = 0;
  const std::shared_ptr<WorldHealth> health_;
  std::unique_ptr<PeerWatch> peer_watch_;  // ends first
};

// Adds to an error of creation: which NCCL, its variables, live communicators and free
// memory. `context`: of a device whose memory is of interest, or null.
Status WithCircumstances(const NcclLibrary& library, const Status& status,
                         cuda::Context context);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_WORLD_H_
