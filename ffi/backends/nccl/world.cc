#include "ffi/backends/nccl/world.h"

#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <system_error>
#include <thread>

#include "ffi/backends/nccl/device_stop.h"
#include "ffi/core/registry.h"
#include "ffi/core/watchdog.h"
#include "ffi/os/forked.h"

extern char** environ;

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPoll = std::chrono::microseconds(200);
// How long the end of a communicator may take before it is ended by force.
constexpr double kGraceSeconds = 10;

}  // namespace

Status WithCircumstances(const NcclLibrary& library, const Status& status,
                         cuda::Context context) {
  return Status(ErrorCode::kInternal,
                StrCat(status.message(), ". ", NcclCircumstances(library, context)));
}

int64_t FreeDeviceBytes(const NcclLibrary& library, cuda::Context context) {
  CurrentContext current(library.cuda, context);
  size_t free = 0, total = 0;
  library.cuda.MemGetInfo(&free, &total);
  return static_cast<int64_t>(free);
}

bool ToldDeviceBytes(const NcclLibrary& library, nccl::Comm comm, nccl::MemStat stat,
                     int64_t* bytes) {
  uint64_t told = 0;
  if (comm == nullptr || library.nccl.CommMemStats == nullptr ||
      library.nccl.CommMemStats(comm, stat, &told) != nccl::kSuccess) {
    return false;
  }
  *bytes += static_cast<int64_t>(told);
  return true;
}

bool NcclWorld::Tell(int64_t* bytes) const {
  bool tells = false;
  for (nccl::Comm comm : comms_) {
    tells = ToldDeviceBytes(library_, comm, nccl::MemStat::kTotal, bytes) || tells;
  }
  return tells;
}

std::string NcclCircumstances(const NcclLibrary& library, cuda::Context context) {
  std::string text = StrCat("NCCL ", library.VersionText(), " from ", library.path,
                            "; variables set:");
  std::string set;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "NCCL_", 5) == 0) set += StrCat(" ", *entry);
  }
  text += set.empty() ? " none" : set;
  const RegistryCounters counters = Registry::Get().counters();
  text += StrCat("; live communicators: ", counters.live);
  struct sysinfo host;
  if (sysinfo(&host) == 0) {
    const uint64_t unit = host.mem_unit;
    text += StrCat("; free MiB: host ", (host.freeram * unit) >> 20);
  }
  if (context != nullptr) {
    CurrentContext current(library.cuda, context);
    size_t free = 0, total = 0;
    if (library.cuda.MemGetInfo(&free, &total) == cuda::kSuccess) {
      text += StrCat(", device ", free >> 20, " of ", total >> 20);
    }
  }
  struct statvfs shared;
  if (statvfs("/dev/shm", &shared) == 0) {
    const uint64_t unit = shared.f_frsize;
    text += StrCat(", /dev/shm ", (shared.f_bavail * unit) >> 20);
  }
  return text;
}

Status WaitUntilReady(const NcclLibrary& library, const std::vector<nccl::Comm>& comms,
                      const NcclPatience& patience, const char* what) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double>(patience.seconds));
  for (nccl::Comm comm : comms) {
    if (comm == nullptr) continue;
    while (true) {
      nccl::Result state = nccl::kSuccess;
      RETURN_IF_ERROR(
          library.Check(library.nccl.CommGetAsyncError(comm, &state), what));
      if (state == nccl::kSuccess) break;
      if (state != nccl::kInProgress) return library.Check(state, what, comm);
      if (patience.interrupted()) return Status(ErrorCode::kCancelled, "interrupted");
      if (Clock::now() > deadline) {
        return Status(ErrorCode::kDeadlineExceeded,
                      StrCat(what, ": not done after ", patience.seconds,
                             " s; other processes may not have come to it"));
      }
      std::this_thread::sleep_for(kPoll);
    }
  }
  return OkStatus();
}

void EndComms(const NcclLibrary& library, const std::vector<nccl::Comm>& comms,
              bool abort) {
  // NCCL would ask the driver, which answers nothing any more.
  if (DevicesAreStopped()) return;
  const bool has_any = std::any_of(comms.begin(), comms.end(),
                                   [](nccl::Comm comm) { return comm != nullptr; });
  if (!has_any) return;
  // NCCL waits for the other ranks here, who may never come, or for the device: on a
  // thread that can be left alone.
  const auto ended = std::make_shared<std::promise<void>>();
  std::future<void> end = ended->get_future();
  const auto run = [&library, comms, abort, ended] {
    if (abort) {
      for (nccl::Comm comm : comms) {
        if (comm != nullptr) library.nccl.CommAbort(comm);
      }
      ended->set_value();
      return;
    }
    library.nccl.GroupStart();
    for (nccl::Comm comm : comms) {
      if (comm != nullptr) library.nccl.CommFinalize(comm);
    }
    library.nccl.GroupEnd();
    NcclPatience patience;
    patience.seconds = kGraceSeconds;
    WaitUntilReady(library, comms, patience, "ncclCommFinalize");
    ended->set_value();
  };
  try {
    std::thread(run).detach();
  } catch (const std::system_error&) {
    return;  // No thread can be had: they stay until the process ends.
  }
  if (end.wait_for(std::chrono::duration<double>(kGraceSeconds)) !=
          std::future_status::ready ||
      abort) {
    return;
  }
  const KeptContext kept(library.cuda);
  for (nccl::Comm comm : comms) {
    if (comm != nullptr) library.nccl.CommDestroy(comm);
  }
}

Status NcclWorld::Create(const NcclLibrary& library, int size,
                         std::vector<NcclDevice> devices, const std::string& unique_id,
                         const NcclSettings& settings, const NcclPatience& patience,
                         std::vector<Peer> peers, std::shared_ptr<NcclWorld>* world) {
  nccl::UniqueId id;
  if (unique_id.size() != sizeof(id.internal)) {
    return InvalidArgument("a unique id of NCCL has ", sizeof(id.internal),
                           " bytes, not ", unique_id.size());
  }
  std::memcpy(id.internal, unique_id.data(), sizeof(id.internal));
  const KeptContext kept(library.cuda);
  std::shared_ptr<NcclWorld> made(new NcclWorld(library, std::move(devices)));
  int64_t free_before = 0;
  for (const NcclDevice& device : made->devices_) {
    cuda::Device cuda_device = 0;
    cuda::Context context = nullptr;
    if (Status status = library.Check(
            library.cuda.DeviceGet(&cuda_device, device.ordinal), "cuDeviceGet");
        status.failure()) {
      return WithCircumstances(library, status, nullptr);
    }
    if (Status status =
            library.Check(library.cuda.DevicePrimaryCtxRetain(&context, cuda_device),
                          "cuDevicePrimaryCtxRetain");
        status.failure()) {
      return WithCircumstances(library, status, nullptr);
    }
    made->contexts_.push_back(context);
    if (Status status = PrepareDeviceStop(library, context); status.failure()) {
      return WithCircumstances(library, status, context);
    }
    free_before += FreeDeviceBytes(library, context);
  }
  nccl::Config config = settings.ConfigFor(library);
  if (config.blocking == nccl::kUndefined) config.blocking = 0;
  made->comms_.assign(made->devices_.size(), nullptr);
  Status status = OkStatus();
  library.nccl.GroupStart();
  for (size_t i = 0; i < made->devices_.size() && status.success(); ++i) {
    CurrentContext current(library.cuda, made->contexts_[i]);
    status =
        library.Check(library.nccl.CommInitRankConfig(&made->comms_[i], size, id,
                                                      made->devices_[i].rank, &config),
                      "ncclCommInitRankConfig");
  }
  Status ended = library.Check(library.nccl.GroupEnd(), "ncclCommInitRankConfig");
  if (status.success()) status = std::move(ended);
  if (status.success()) {
    status = WaitUntilReady(library, made->comms_, patience, "ncclCommInitRankConfig");
  }
  if (status.failure()) {
    EndComms(library, made->comms_, /*abort=*/true);
    made->comms_.clear();
    return WithCircumstances(library, status, made->contexts_[0]);
  }
  for (cuda::Context context : made->contexts_) {
    free_before -= FreeDeviceBytes(library, context);
  }
  if (!made->Tell(&made->device_bytes_)) {
    made->device_bytes_ = std::max<int64_t>(0, free_before);
  }
  if (!peers.empty()) {
    made->peer_watch_ = std::make_unique<PeerWatch>(
        peers, [peers, weak = std::weak_ptr<NcclWorld>(made)](size_t place) {
          const auto self = weak.lock();
          if (self == nullptr) return;
          {
            std::lock_guard<std::mutex> lock(self->gone_mutex_);
            self->gone_.push_back(peers[place].process_index);
          }
          self->any_gone_.store(true, std::memory_order_release);
          WakeWatchdog();
        });
  }
  *world = std::move(made);
  return OkStatus();
}

NcclWorld::~NcclWorld() {
  if (IsForked()) return;
  peer_watch_.reset();
  if (library_.test_double != nullptr) library_.test_double->forget(this);
  EndComms(library_, comms_, /*abort=*/is_broken() || any_gone());
  for (const auto& children : abandoned_) EndComms(library_, *children, /*abort=*/true);
  for (size_t i = 0; i < contexts_.size(); ++i) {
    cuda::Device device = 0;
    library_.cuda.DeviceGet(&device, devices_[i].ordinal);
    library_.cuda.DevicePrimaryCtxRelease(device);
  }
}

void NcclWorld::AddSharer(std::weak_ptr<Sharer> sharer) {
  std::lock_guard<std::mutex> lock(sharers_mutex_);
  sharers_.erase(std::remove_if(sharers_.begin(), sharers_.end(),
                                [](const auto& each) { return each.expired(); }),
                 sharers_.end());
  sharers_.push_back(std::move(sharer));
}

std::vector<std::shared_ptr<NcclWorld::Sharer>> NcclWorld::sharers() const {
  std::lock_guard<std::mutex> lock(sharers_mutex_);
  std::vector<std::shared_ptr<Sharer>> live;
  for (const auto& each : sharers_) {
    if (auto sharer = each.lock()) live.push_back(std::move(sharer));
  }
  return live;
}

std::vector<int> NcclWorld::gone() const {
  std::lock_guard<std::mutex> lock(gone_mutex_);
  return gone_;
}

Status NcclWorld::Split(const std::vector<int>& colors, const std::vector<int>& keys,
                        const NcclSettings& settings, const NcclPatience& patience,
                        std::vector<nccl::Comm>* children) {
  nccl::Config config = settings.ConfigFor(library_);
  // Unless it blocks, NCCL gives every operation to a thread of its own, which takes
  // 300 us. The split is polled all the same, as its parent is.
  if (config.blocking == nccl::kUndefined) config.blocking = 1;
  children->clear();
  // NCCL keeps the addresses until it is done, whether or not we wait for that.
  auto made = std::make_unique<std::vector<nccl::Comm>>(devices_.size(), nullptr);
  Status status = OkStatus();
  library_.nccl.GroupStart();
  for (size_t i = 0; i < devices_.size() && status.success(); ++i) {
    CurrentContext current(library_.cuda, contexts_[i]);
    status = library_.Check(
        library_.nccl.CommSplit(comms_[i], colors[i], keys[i], &(*made)[i], &config),
        "ncclCommSplit");
  }
  Status ended = library_.Check(library_.nccl.GroupEnd(), "ncclCommSplit");
  if (status.success()) status = std::move(ended);
  if (status.success()) {
    status = WaitUntilReady(library_, comms_, patience, "ncclCommSplit");
  }
  if (status.success()) {
    status = WaitUntilReady(library_, *made, patience, "ncclCommSplit");
  }
  if (status.failure()) {
    SetBroken();
    bool is_busy = false;
    for (const auto& sharer : sharers()) {
      sharer->FailToo(status);
      is_busy = is_busy || sharer->is_busy();
    }
    // An abort would end what is on its way in those that share, without a result. So
    // these wait for the end of the world.
    if (!is_busy) {
      std::vector<nccl::Comm> there;
      for (nccl::Comm& comm : *made) {
        there.push_back(__atomic_load_n(&comm, __ATOMIC_ACQUIRE));  // it is done
        if (there.back() != nullptr) comm = nullptr;
      }
      EndComms(library_, there, /*abort=*/true);
    }
    abandoned_.push_back(std::move(made));
    return status;
  }
  *children = std::move(*made);
  return OkStatus();
}

}  // namespace jaxcomm
