#include "ffi/backends/nccl/engines/peer_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "ffi/backends/nccl/library/primary_contexts.h"
#include "ffi/core/hash.h"
#include "ffi/os/mutex.h"
#include "ffi/os/system_file.h"

namespace jaxcomm {
namespace {

// Where the infos of all ranks arrive, in a rank's scratch memory.
constexpr size_t kArriveAt = 1024;

}  // namespace

uint64_t ThisHost() { return Fnv1a(ReadSystemFile("/proc/sys/kernel/random/boot_id")); }

uint64_t ThisProcess() {
  static Mutex mutex;
  static pid_t pid = 0;
  static uint64_t number = 0;
  MutexLock lock(mutex);
  if (pid != getpid()) {
    pid = getpid();
    std::random_device random;
    number = uint64_t{random()} << 32 | random();
  }
  return number;
}

void PeerMemory::CannotShare(std::string reason) {
  if (reason_.empty()) reason_ = std::move(reason);
}

ErrorOr<std::unique_ptr<PeerMemory>> PeerMemory::Create(NcclParts& parts, size_t bytes,
                                                        size_t zeroed) {
  std::unique_ptr<PeerMemory> made(new PeerMemory(parts, bytes));
  for (const auto& rank : parts.ranks) {
    Member& member = made->members_.emplace_back();
    member.facts = rank->facts;
    member.mapped.resize(static_cast<size_t>(rank->facts.size));
  }
  for (Member& member : made->members_) {
    if (member.facts.size < 2) continue;
    RETURN_IF_ERROR(made->Allocate(member, zeroed));
  }
  return made;
}

Status PeerMemory::Allocate(Member& member, size_t zeroed) {
  const NcclLibrary& library = parts_.library;
  CurrentContext current(library.cuda, member.facts.context);
  constexpr size_t kInfos = 1 + kMostRanks;
  if (infos_ == nullptr) {
    const size_t bytes = parts_.ranks.size() * kInfos * sizeof(Info);
    RETURN_IF_ERROR(library.Try(library.cuda.MemAllocHost, &infos_, bytes));
    std::memset(infos_, 0, bytes);
  }
  member.infos = static_cast<Info*>(infos_) + member.facts.place * kInfos;
  Info& own = *member.infos;
  own.host = ThisHost();
  own.process = ThisProcess();
  if (member.facts.size > kMostRanks) {
    CannotShare(StrCat("more than ", kMostRanks, " ranks"));
    return OkStatus();
  }
  // A failure is no error: the other processes would wait for this one. They learn of
  // it.
  Status able = library.Try(library.cuda.MemAlloc, &member.own, bytes_);
  if (able.success() && IsOfSeveralProcesses(member)) {
    able = library.Try(library.cuda.IpcGetMemHandle, &own.handle, member.own);
  }
  own.is_able = able.success();
  if (able.failure()) {
    CannotShare(std::string(able.message()));
    return OkStatus();
  }
  const cuda::Stream stream = parts_.ranks[member.facts.place]->split_phase.stream();
  return library.Try(library.cuda.MemsetD8Async, member.own + bytes_ - zeroed, 0,
                     zeroed, stream);
}

bool PeerMemory::IsOfSeveralProcesses(const Member& member) const {
  const auto here = std::count_if(
      members_.begin(), members_.end(),
      [&](const Member& each) { return each.facts.group == member.facts.group; });
  return here < member.facts.size;
}

void PeerMemory::SetUnable(size_t place, const Status& reason) {
  members_[place].infos->is_able = 0;
  CannotShare(std::string(reason.message()));
}

PeerMemory::~PeerMemory() {
  const cuda::Api& cuda = parts_.library.cuda;
  for (const Member& member : members_) {
    CurrentContext current(cuda, member.facts.context);
    if (member.own != 0 && !keeps_own_) cuda.MemFree(member.own);
  }
  if (infos_ == nullptr) return;
  CurrentContext current(cuda, members_[0].facts.context);
  cuda.MemFreeHost(infos_);
}

int64_t PeerMemory::device_bytes() const {
  int64_t bytes = 0;
  for (const Member& member : members_) {
    if (member.own != 0) bytes += static_cast<int64_t>(bytes_);
  }
  return bytes;
}

Status PeerMemory::Share() {
  RETURN_IF_ERROR(Exchange());
  for (Member& member : members_) {
    if (member.infos != nullptr) Map(member);
  }
  RETURN_IF_ERROR(Exchange());
  for (Member& member : members_) {
    member.is_shared = member.infos != nullptr && AreAble(member);
  }
  return OkStatus();
}

bool PeerMemory::AreAble(const Member& member) {
  if (member.facts.size > kMostRanks) return false;
  for (int rank = 0; rank < member.facts.size; ++rank) {
    const Info& info = member.infos[1 + rank];
    if (info.host != member.infos[0].host) {
      CannotShare(StrCat("rank ", rank, " is on another host"));
      return false;
    }
    if (info.is_able == 0) {
      CannotShare(StrCat("rank ", rank, " cannot"));
      return false;
    }
  }
  return true;
}

void PeerMemory::Map(Member& member) {
  CurrentContext current(parts_.library.cuda, member.facts.context);
  Info& own = member.infos[0];
  own.is_able = AreAble(member);
  if (own.is_able == 0 && member.own != 0) {
    // Nobody of the group maps it: all know the same.
    parts_.library.cuda.MemFree(std::exchange(member.own, 0));
  }
  for (int rank = 0; rank < member.facts.size && own.is_able != 0; ++rank) {
    own.is_able = MapOne(member, rank);
  }
}

bool PeerMemory::MapOne(Member& member, int rank) {
  const NcclLibrary& library = parts_.library;
  const Info& info = member.infos[1 + rank];
  cuda::Pointer& mapped = member.mapped[static_cast<size_t>(rank)];
  if (info.process != member.infos[0].process) {
    const Status opened = library.Try(library.cuda.IpcOpenMemHandle, &mapped,
                                      info.handle, cuda::kIpcEnablePeerAccess);
    if (opened.failure()) {
      CannotShare(std::string(opened.message()));
      return false;
    }
    member.opened.push_back(mapped);
    return true;
  }
  for (const Member& other : members_) {
    if (other.facts.group != member.facts.group || other.facts.rank != rank) continue;
    mapped = other.own;
    if (CanReachPeers(library, {member.facts, other.facts})) return true;
    CannotShare("a device cannot reach the memory of another");
  }
  return false;
}

Status PeerMemory::Exchange() {
  const NcclLibrary& library = parts_.library;
  Comms& comms = parts_.comms;
  static_assert(kArriveAt + kMostRanks * sizeof(Info) <= Comms::kScratchBytes);
  const auto shares = [](const Member& member) {
    return member.infos != nullptr && member.facts.size <= kMostRanks;
  };
  for (const Member& member : members_) {
    if (!shares(member)) continue;
    const size_t place = member.facts.place;
    CurrentContext current(library.cuda, member.facts.context);
    RETURN_IF_ERROR(library.Try(library.cuda.MemcpyHtoDAsync, comms.scratch(place),
                                member.infos, sizeof(Info),
                                parts_.ranks[place]->split_phase.stream()));
  }
  RETURN_IF_ERROR(comms.InGroup("first use", [&](LocalRank& rank, nccl::Comm comm) {
    const size_t place = rank.facts.place;
    if (!shares(members_[place])) return nccl::kSuccess;
    return library.nccl.AllGather(
        reinterpret_cast<void*>(comms.scratch(place)),
        reinterpret_cast<void*>(comms.scratch(place) + kArriveAt), sizeof(Info),
        nccl::Type::kInt8, comm, rank.split_phase.stream());
  }));
  for (const Member& member : members_) {
    if (!shares(member)) continue;
    const size_t place = member.facts.place;
    CurrentContext current(library.cuda, member.facts.context);
    RETURN_IF_ERROR(library.Try(library.cuda.MemcpyDtoHAsync, member.infos + 1,
                                comms.scratch(place) + kArriveAt,
                                static_cast<size_t>(member.facts.size) * sizeof(Info),
                                parts_.ranks[place]->split_phase.stream()));
  }
  return comms.WaitForStreams();
}

void PeerMemory::Unmap() {
  for (Member& member : members_) {
    CurrentContext current(parts_.library.cuda, member.facts.context);
    for (cuda::Pointer opened : member.opened) {
      parts_.library.cuda.IpcCloseMemHandle(opened);
    }
    member.opened.clear();
    member.is_shared = false;
  }
}

}  // namespace jaxcomm
