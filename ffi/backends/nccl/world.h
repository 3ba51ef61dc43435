// The communicator of all devices of a mesh, of which others are split off.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_WORLD_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_WORLD_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/backends/nccl/library.h"
#include "ffi/core/status.h"
#include "ffi/os/peer_watch.h"

namespace jaxcomm {

// How long to wait for the other processes, and what else ends the wait (Ctrl-C).
struct NcclPatience {
  double seconds = 300;
  std::function<bool()> interrupted = [] { return false; };
};

// The fields of ncclConfig_t that a policy sets, by NCCL's names; what is not there is
// NCCL's default.
struct NcclSettings {
  std::map<std::string, int> numbers;
  std::string name;
  std::string net_name;

  // As the library's version lays it out. Points into this.
  nccl::Config ConfigFor(const NcclLibrary& library) const;
  // A field that this version does not know; empty if there is none.
  std::string Unknown(const NcclLibrary& library) const;
};

// One device of this process.
struct NcclDevice {
  int64_t id = 0;   // global, as JAX numbers it
  int ordinal = 0;  // local, as CUDA numbers it
  int rank = 0;     // in the world
};

class NcclWorld : public std::enable_shared_from_this<NcclWorld> {
 public:
  // A communicator that shares NCCL's resources with others of the world. NCCL has one
  // abort flag for all of them and tells none that it was set: they fail together.
  class Sharer {
   public:
    virtual ~Sharer() = default;
    // Refuses every call from now on, with this reason unless it has one.
    virtual void FailToo(const Status& reason) = 0;
    // Whether a device may be at an operation of it.
    virtual bool is_busy() = 0;
    // Names the first operation that a device is at, as a message begins; "" if none.
    virtual std::string FirstOperation() = 0;
  };

  // Joins the `size` ranks that know `unique_id`; every process calls it.
  // `peers`: those of the other processes whose end this one can see.
  static Status Create(const NcclLibrary& library, int size,
                       std::vector<NcclDevice> devices, const std::string& unique_id,
                       const NcclSettings& settings, const NcclPatience& patience,
                       std::vector<Peer> peers, std::shared_ptr<NcclWorld>* world);
  ~NcclWorld();

  // Splits off communicators, one for each of the local devices: those of a color
  // belong together, in the order of their keys; null where the color is
  // nccl::kNoColor. Every process calls it.
  Status Split(const std::vector<int>& colors, const std::vector<int>& keys,
               const NcclSettings& settings, const NcclPatience& patience,
               std::vector<nccl::Comm>* children);

  void AddSharer(std::weak_ptr<Sharer> sharer);
  // Those that live.
  std::vector<std::shared_ptr<Sharer>> sharers() const;

  // Whether a communicator was ended by force, and with it those that share with it: no
  // others can be split off.
  bool is_broken() const { return is_broken_.load(); }
  void SetBroken() { is_broken_.store(true); }
  // Whether it would see other processes end.
  bool has_peers() const { return peer_watch_ != nullptr; }
  // Whether processes have ended, and which, by JAX's index.
  bool any_gone() const { return any_gone_.load(std::memory_order_acquire); }
  std::vector<int> gone() const;
  const NcclLibrary& library() const { return library_; }
  const std::vector<NcclDevice>& devices() const { return devices_; }
  cuda::Context context(size_t device) const { return contexts_[device]; }
  // Device memory that it took, in bytes, on all local devices.
  int64_t device_bytes() const { return device_bytes_; }
  // Adds what it and those that share with it hold now, as NCCL tells it; false where
  // it does not.
  bool Tell(int64_t* bytes) const;

 private:
  NcclWorld(const NcclLibrary& library, std::vector<NcclDevice> devices)
      : library_(library), devices_(std::move(devices)) {}

  const NcclLibrary& library_;
  const std::vector<NcclDevice> devices_;
  std::vector<cuda::Context> contexts_;
  std::vector<nccl::Comm> comms_;
  // Of splits that failed: NCCL may still put communicators here, until those that they
  // are split off end.
  std::vector<std::unique_ptr<std::vector<nccl::Comm>>> abandoned_;
  int64_t device_bytes_ = 0;
  mutable std::mutex sharers_mutex_;
  std::vector<std::weak_ptr<Sharer>> sharers_;
  std::atomic<bool> is_broken_{false};
  std::atomic<bool> any_gone_{false};
  mutable std::mutex gone_mutex_;
  std::vector<int> gone_;
  std::unique_ptr<PeerWatch> peer_watch_;  // ends first
};

// Waits until no operation on the communicators is in progress.
Status WaitUntilReady(const NcclLibrary& library, const std::vector<nccl::Comm>& comms,
                      const NcclPatience& patience, const char* what);

// Ends communicators in order with those of the other processes, or by force, for ten
// seconds at most, after which they are left as they are. NCCL frees memory here and
// waits for the device: the caller is not a thread that others depend on.
void EndComms(const NcclLibrary& library, const std::vector<nccl::Comm>& comms,
              bool abort);

// Free bytes of a device.
int64_t FreeDeviceBytes(const NcclLibrary& library, cuda::Context context);

// Adds the device memory of a communicator, as NCCL tells it; false where it does not.
bool ToldDeviceBytes(const NcclLibrary& library, nccl::Comm comm, nccl::MemStat stat,
                     int64_t* bytes);

// What one wants to know when a communicator cannot be made.
// `context`: of a device whose memory is of interest, or null.
std::string NcclCircumstances(const NcclLibrary& library, cuda::Context context);

// An error of creation, with that.
Status WithCircumstances(const NcclLibrary& library, const Status& status,
                         cuda::Context context);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_WORLD_H_
