#include "ffi/backends/nccl/world.h"

#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "ffi/backends/nccl/failure/health.h"
#include "ffi/backends/nccl/library/device_memory.h"
#include "ffi/core/watchdog.h"
#include "ffi/os/forked.h"

extern char** environ;

namespace jaxcomm {

namespace {

// NCCL may be the first to notice that a process has ended, and does not say which.
Status WithGone(const Status& status, const WorldHealth& health) {
  if (!health.any_gone() || status.errc() == ErrorCode::kAborted) return status;
  return Status(ErrorCode::kAborted,
                StrCat(status.message(), ". ", health.gone_text(), " has ended"));
}

}  // namespace

bool NcclWorld::AddDeviceBytes(int64_t* bytes) const {
  bool is_known = false;
  for (size_t i = 0; i < comms_.size(); ++i) {
    const CurrentContext current(library_.cuda, contexts_[i]);
    is_known =
        jaxcomm::AddDeviceBytes(library_, comms_[i], nccl::MemStat::kTotal, bytes) ||
        is_known;
  }
  return is_known;
}

ErrorOr<std::shared_ptr<NcclWorld>> NcclWorld::Create(
    const NcclLibrary& library, int size, std::vector<NcclDevice> devices,
    const std::string& unique_id, const NcclSettings& settings, NcclPatience patience,
    std::vector<Peer> peers) {
  nccl::UniqueId id;
  if (unique_id.size() != sizeof(id.internal)) {
    return InvalidArgument("a unique id of NCCL has ", sizeof(id.internal),
                           " bytes, not ", unique_id.size());
  }
  std::memcpy(id.internal, unique_id.data(), sizeof(id.internal));
  std::shared_ptr<NcclWorld> made(new NcclWorld(library, size, std::move(devices)));
  const std::vector<cuda::Context>& contexts = made->contexts_.all();
  if (made->contexts_.status().failure()) {
    return WithCircumstances(library, made->contexts_.status(), contexts[0]);
  }
  int64_t free_before = 0;
  for (cuda::Context context : contexts) {
    free_before += FreeDeviceBytes(library, context);
  }
  const std::shared_ptr<WorldHealth>& health = made->health_;
  if (!peers.empty()) {
    health->SeesPeers();
    made->peer_watch_ =
        std::make_unique<PeerWatch>(peers, [peers, health](size_t place) {
          health->AddGone(peers[place].process_index);
          WakeWatchdog();
        });
  }
  nccl::Config config = settings.ConfigFor(library);
  if (config.blocking == nccl::kUndefined) config.blocking = 0;
  made->comms_.assign(made->devices_.size(), nullptr);
  Status status = library.InGroup("ncclCommInitRankConfig", contexts, [&](size_t i) {
    return library.Try(library.nccl.CommInitRankConfig, &made->comms_[i], size, id,
                       made->devices_[i].rank, &config);
  });
  if (status.success()) {
    patience.lost_peers = [&] { return health->gone_text(); };
    status = WaitUntilReady(library, made->comms_, patience, "ncclCommInitRankConfig");
  }
  if (status.failure()) {
    EndComms(library, made->comms_, contexts, /*abort=*/true);
    made->comms_.clear();
    return WithCircumstances(library, WithGone(status, *health), contexts[0]);
  }
  for (cuda::Context context : contexts) {
    free_before -= FreeDeviceBytes(library, context);
  }
  if (!made->AddDeviceBytes(&made->device_bytes_)) {
    made->device_bytes_ = std::max<int64_t>(0, free_before);
  }
  return made;
}

NcclWorld::~NcclWorld() {
  if (IsForked()) return;
  peer_watch_.reset();
  const std::vector<cuda::Context>& contexts = contexts_.all();
  EndComms(library_, comms_, contexts,
           /*abort=*/health_->is_broken() || health_->any_gone());
  for (const auto& children : abandoned_) {
    EndComms(library_, *children, contexts, /*abort=*/true);
  }
}

ErrorOr<std::vector<nccl::Comm>> NcclWorld::Split(const std::vector<int>& colors,
                                                  const std::vector<int>& keys,
                                                  const NcclSettings& settings,
                                                  NcclPatience patience) {
  nccl::Config config = settings.ConfigFor(library_);
  // Unless it blocks, NCCL gives every operation to a thread of its own, which takes
  // 300 us. The split is polled all the same, as its parent is.
  if (config.blocking == nccl::kUndefined) config.blocking = 1;
  // NCCL keeps the addresses until it is done, whether or not we wait for that.
  auto made = std::make_unique<std::vector<nccl::Comm>>(devices_.size(), nullptr);
  Status status = library_.InGroup("ncclCommSplit", contexts_.all(), [&](size_t i) {
    return library_.Try(library_.nccl.CommSplit, comms_[i], colors[i], keys[i],
                        &(*made)[i], &config);
  });
  // Every process of the world takes part.
  patience.lost_peers = [this]() -> std::string {
    return ProcessFailure::Get().IsAnyBusy() ? "" : health_->gone_text();
  };
  if (status.success()) {
    status = WaitUntilReady(library_, comms_, patience, "ncclCommSplit");
  }
  if (status.success()) {
    status = WaitUntilReady(library_, *made, patience, "ncclCommSplit");
  }
  if (status.failure()) {
    health_->SetBroken(StrCat("one more could not be made: ", status.message()));
    // An abort would end operations of the communicators that share, without a result.
    // So if one is busy, the new ones wait for the end of the world.
    if (!ProcessFailure::Get().IsAnyBusy()) {
      std::vector<nccl::Comm> there;  // in the order of the devices
      for (nccl::Comm& comm : *made) {
        there.push_back(__atomic_load_n(&comm, __ATOMIC_ACQUIRE));  // it is done
        if (there.back() != nullptr) comm = nullptr;
      }
      EndComms(library_, there, contexts_.all(), /*abort=*/true);
    }
    abandoned_.push_back(std::move(made));
    return WithGone(status, *health_);
  }
  return std::move(*made);
}

Status WithCircumstances(const NcclLibrary& library, const Status& status,
                         cuda::Context context) {
  std::string variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "NCCL_", 5) == 0) variables += StrCat(" ", *entry);
  }
  std::string text =
      StrCat(status.message(), ". NCCL ", library.VersionText(), " from ", library.path,
             "; variables set:", variables.empty() ? " none" : variables,
             "; live communicators: ", Health::num_watched());
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
  return Status(ErrorCode::kInternal, text);
}

}  // namespace jaxcomm
