#include "ffi/backends/nccl/engines/peer_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/library/primary_contexts.h"
#include "ffi/core/hash.h"
#include "ffi/os/forked.h"
#include "ffi/os/mutex.h"
#include "ffi/os/system_file.h"

namespace jaxcomm {
namespace {

// Where the infos of all ranks arrive, in a rank's scratch memory.
constexpr size_t kArriveAt = 1024;
// Where a process is told that others have left: a byte for each rank here and each
// other rank of its group. Not in the memory itself, which they have unmapped by then.
constexpr int64_t kFarewellsAt = 64;  // behind the segment's own number
constexpr int64_t kFarewellBytes = 64 << 10;
// How long it waits for the others. Afterwards memory goes back when an arena is next
// looked at.
constexpr double kLeaveSeconds = 1;

// What tells a host, and a process on it, from others. Process ids are not the same in
// all containers of a host.
uint64_t ThisHost() { return Fnv1a(ReadSystemFile("/proc/sys/kernel/random/boot_id")); }

uint64_t ThisProcess() {
  static Mutex mutex;
  static pid_t pid GUARDED_BY(mutex) = 0;
  static uint64_t number GUARDED_BY(mutex) = 0;
  MutexLock lock(mutex);
  if (pid != getpid()) {
    pid = getpid();
    std::random_device random;
    number = uint64_t{random()} << 32 | random();
  }
  return number;
}

// 0: unknown.
uint64_t ThisPidNamespace() {
  char name[64] = {};
  const ssize_t length = readlink("/proc/self/ns/pid", name, sizeof(name) - 1);
  return length <= 0 ? 0 : Fnv1a({name, static_cast<size_t>(length)});
}

// The byte by which a rank says that it has left the memory of the rank at `place`.
char* FarewellOf(const Segment& segment, uint64_t place, int rank) {
  return segment.data() + kFarewellsAt + place * PeerMemory::kMostRanks +
         static_cast<size_t>(rank);
}

}  // namespace

PeerMemory::PeerMemory(const NcclLibrary& library,
                       const std::vector<RankFacts>& members,
                       const std::vector<cuda::Stream>& streams, size_t most_bytes)
    : library_(library), most_bytes_(most_bytes) {
  Info info;
  info.host = ThisHost();
  info.process = ThisProcess();
  info.pid_namespace = ThisPidNamespace();
  info.pid = static_cast<uint64_t>(getpid());
  info.start_time = PeerOf(getpid(), 0).start_time;
  for (size_t place = 0; place < members.size(); ++place) {
    Member& member = members_.emplace_back();
    member.facts = members[place];
    member.stream = streams[place];
    member.mapped.resize(static_cast<size_t>(member.facts.size));
    member.infos.assign(1 + kMostRanks, Info());
    member.infos[0] = info;
  }
}

PeerMemory::~PeerMemory() {
  Leave(/*is_busy=*/false, /*has_failed=*/true);
  for (Member& member : members_) {
    if (!is_kept_) GiveBack(member);
    CurrentContext current(library_.cuda, member.facts.context);
    if (member.zeroed != nullptr) library_.cuda.EventDestroy(member.zeroed);
  }
  if (exchanged_ == nullptr) return;
  CurrentContext current(library_.cuda, members_[0].facts.context);
  library_.cuda.MemFreeHost(exchanged_);
}

void PeerMemory::CannotShare(std::string reason) {
  if (reason_.empty()) reason_ = std::move(reason);
}

bool PeerMemory::IsHere(const Member& member) const {
  const auto here = std::count_if(
      members_.begin(), members_.end(),
      [&](const Member& each) { return each.facts.group == member.facts.group; });
  return here == member.facts.size;
}

bool PeerMemory::IsExchanged(const Member& member) const {
  return member.facts.size >= 2 && member.facts.size <= kMostRanks && !IsHere(member);
}

Status PeerMemory::Take(size_t place, size_t bytes, size_t zeroed) {
  Member& member = members_[place];
  if (member.facts.size < 2) return OkStatus();
  if (member.facts.size > kMostRanks) {
    CannotShare(StrCat("more than ", kMostRanks, " ranks"));
    return OkStatus();
  }
  const bool is_exported = !IsHere(member);
  if (is_exported && farewells_ == nullptr) {
    auto made = Segment::Create(kFarewellBytes, /*named=*/false);
    if (made.has_error()) {
      CannotShare(std::string(made.error().message()));
      return OkStatus();
    }
    farewells_ = std::move(*made);
  }
  CurrentContext current(library_.cuda, member.facts.context);
  if (Status made = library_.Try(library_.cuda.EventCreate, &member.zeroed,
                                 cuda::kEventDisableTiming);
      made.failure()) {
    CannotShare(std::string(made.message()));
    return OkStatus();
  }
  auto taken = DeviceArena::Of(member.facts.ordinal)
                   .Take(library_, bytes, is_exported, most_bytes_);
  if (taken.has_error()) {
    CannotShare(std::string(taken.error().message()));
    return OkStatus();
  }
  member.region = *taken;
  Info& own = member.infos[0];
  own.is_able = 1;
  if (is_exported) {
    const SegmentAddress& address = farewells_->address();
    std::strncpy(own.path, address.path.c_str(), sizeof(own.path) - 1);
    own.nonce = address.nonce;
    own.place = place;
  }
  RETURN_IF_ERROR(library_.Try(library_.cuda.MemsetD8Async,
                               member.region.at + bytes - zeroed, 0, zeroed,
                               member.stream));
  // Also for memory that is given back before it is shared.
  return library_.Try(library_.cuda.EventRecord, member.zeroed, member.stream);
}

void PeerMemory::SetUnable(size_t place, const Status& reason) {
  members_[place].infos[0].is_able = 0;
  CannotShare(std::string(reason.message()));
}

int64_t PeerMemory::device_bytes() const {
  int64_t bytes = 0;
  for (const Member& member : members_) {
    bytes += static_cast<int64_t>(member.region.bytes);
  }
  return bytes;
}

void PeerMemory::ShareHere() {
  for (Member& member : members_) {
    if (member.region.at == 0) continue;
    CurrentContext current(library_.cuda, member.facts.context);
    const Status recorded =
        library_.Try(library_.cuda.EventRecord, member.zeroed, member.stream);
    if (recorded.failure()) SetUnable(member.facts.place, recorded);
  }
  for (Member& member : members_) {
    if (member.facts.size < 2 || !IsHere(member)) continue;
    if (member.facts.size > kMostRanks) continue;
    for (const Member& other : members_) {
      if (other.facts.group != member.facts.group) continue;
      member.infos[1 + static_cast<size_t>(other.facts.rank)] = other.infos[0];
    }
  }
  // A rank that cannot reach another one makes the whole group unable.
  for (Member& member : members_) {
    if (member.facts.size < 2 || !IsHere(member)) continue;
    Map(member);
  }
  for (Member& member : members_) {
    if (member.facts.size < 2 || !IsHere(member)) continue;
    member.is_shared =
        std::all_of(members_.begin(), members_.end(), [&](const Member& other) {
          return other.facts.group != member.facts.group || other.infos[0].is_able != 0;
        });
  }
  for (Member& member : members_) {
    if (!member.is_shared && IsHere(member)) GiveBack(member);
  }
}

Status PeerMemory::Share(NcclParts& parts) {
  const auto is_exchanged = [this](const Member& each) { return IsExchanged(each); };
  if (std::none_of(members_.begin(), members_.end(), is_exchanged)) return OkStatus();
  // First how to reach each other. So whoever gets a handle can tell its owner that it
  // has left, whatever fails from there on.
  RETURN_IF_ERROR(Exchange(parts));
  for (Member& member : members_) {
    if (IsExchanged(member)) Offer(member);
  }
  RETURN_IF_ERROR(Exchange(parts));
  for (Member& member : members_) {
    if (IsExchanged(member)) Map(member);
  }
  RETURN_IF_ERROR(Exchange(parts));
  for (Member& member : members_) {
    if (!IsExchanged(member)) continue;
    member.is_shared = AreAble(member);
    if (member.is_shared) continue;
    Unmap(member);
    TellOthers(member);
  }
  // Memory that somebody could not map goes back once nobody has it mapped.
  for (Member& member : members_) {
    if (IsExchanged(member) && !member.is_shared) GiveBack(member);
  }
  return OkStatus();
}

void PeerMemory::Offer(Member& member) {
  Info& own = member.infos[0];
  own.is_able = AreAble(member) && AttachFarewells(member);
  if (own.is_able == 0) return;
  own.segment = member.region.segment;
  own.offset = member.region.offset;
  own.bytes = member.region.bytes;
  own.handle = member.region.handle;
  member.is_offered = true;
}

bool PeerMemory::AttachFarewells(const Member& member) {
  for (int rank = 0; rank < member.facts.size; ++rank) {
    const Info& info = member.infos[1 + static_cast<size_t>(rank)];
    if (info.process == member.infos[0].process) continue;
    std::shared_ptr<Segment>& theirs = farewells_of_[info.process];
    if (theirs != nullptr) continue;
    auto attached = Segment::Attach({info.path, kFarewellBytes, info.nonce});
    if (attached.has_error()) {
      CannotShare(std::string(attached.error().message()));
      return false;
    }
    theirs = std::move(*attached);
  }
  return true;
}

bool PeerMemory::AreAble(const Member& member) {
  if (member.facts.size > kMostRanks) return false;
  for (int rank = 0; rank < member.facts.size; ++rank) {
    const Info& info = member.infos[1 + static_cast<size_t>(rank)];
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
  CurrentContext current(library_.cuda, member.facts.context);
  Info& own = member.infos[0];
  own.is_able = AreAble(member);
  // All know it, and nobody maps anything.
  if (own.is_able == 0) member.is_offered = false;
  for (int rank = 0; rank < member.facts.size && own.is_able != 0; ++rank) {
    own.is_able = MapOne(member, rank);
  }
}

bool PeerMemory::MapOne(Member& member, int rank) {
  const Info& info = member.infos[1 + static_cast<size_t>(rank)];
  cuda::Pointer& mapped = member.mapped[static_cast<size_t>(rank)];
  if (info.process != member.infos[0].process) {
    const auto opened = OpenedSegments::Open(library_, member.facts.context,
                                             info.process, info.segment, info.handle);
    if (opened.has_error()) {
      CannotShare(std::string(opened.error().message()));
      return false;
    }
    member.opened.push_back(*opened);
    mapped = *opened + info.offset;
    return true;
  }
  for (const Member& other : members_) {
    if (other.facts.group != member.facts.group || other.facts.rank != rank) continue;
    mapped = other.region.at;
    if (CanReachPeers(library_, {member.facts, other.facts})) return true;
    CannotShare("a device cannot reach the memory of another");
  }
  return false;
}

Status PeerMemory::Exchange(NcclParts& parts) {
  static_assert(sizeof(Info) <= kArriveAt);
  static_assert(kArriveAt + kMostRanks * sizeof(Info) <= Comms::kScratchBytes);
  constexpr size_t kInfos = 1 + kMostRanks;
  Comms& comms = parts.comms;
  if (exchanged_ == nullptr) {
    CurrentContext current(library_.cuda, members_[0].facts.context);
    void* memory = nullptr;
    RETURN_IF_ERROR(library_.Try(library_.cuda.MemAllocHost, &memory,
                                 members_.size() * kInfos * sizeof(Info)));
    exchanged_ = static_cast<Info*>(memory);
  }
  for (size_t place = 0; place < members_.size(); ++place) {
    const Member& member = members_[place];
    if (!IsExchanged(member)) continue;
    exchanged_[place * kInfos] = member.infos[0];
    CurrentContext current(library_.cuda, member.facts.context);
    RETURN_IF_ERROR(library_.Try(library_.cuda.MemcpyHtoDAsync, comms.scratch(place),
                                 exchanged_ + place * kInfos, sizeof(Info),
                                 member.stream));
  }
  RETURN_IF_ERROR(comms.InGroup("first use", [&](LocalRank& rank, nccl::Comm comm) {
    const size_t place = rank.facts.place;
    if (!IsExchanged(members_[place])) return nccl::kSuccess;
    return library_.nccl.AllGather(
        reinterpret_cast<void*>(comms.scratch(place)),
        reinterpret_cast<void*>(comms.scratch(place) + kArriveAt), sizeof(Info),
        nccl::Type::kInt8, comm, members_[place].stream);
  }));
  for (size_t place = 0; place < members_.size(); ++place) {
    const Member& member = members_[place];
    if (!IsExchanged(member)) continue;
    CurrentContext current(library_.cuda, member.facts.context);
    RETURN_IF_ERROR(library_.Try(
        library_.cuda.MemcpyDtoHAsync, exchanged_ + place * kInfos + 1,
        comms.scratch(place) + kArriveAt,
        static_cast<size_t>(member.facts.size) * sizeof(Info), member.stream));
  }
  RETURN_IF_ERROR(comms.WaitForStreams());
  for (size_t place = 0; place < members_.size(); ++place) {
    Member& member = members_[place];
    if (!IsExchanged(member)) continue;
    std::copy_n(exchanged_ + place * kInfos + 1, member.facts.size,
                member.infos.begin() + 1);
  }
  return OkStatus();
}

void PeerMemory::Unmap(Member& member) {
  CurrentContext current(library_.cuda, member.facts.context);
  for (cuda::Pointer opened : std::exchange(member.opened, {})) {
    OpenedSegments::Close(library_, opened);
  }
}

void PeerMemory::TellOthers(const Member& member) {
  if (IsForked()) return;  // its parent has mapped it still
  for (int rank = 0; rank < member.facts.size; ++rank) {
    const Info& info = member.infos[1 + static_cast<size_t>(rank)];
    if (info.process == member.infos[0].process) continue;
    const auto theirs = farewells_of_.find(info.process);
    if (theirs == farewells_of_.end() || theirs->second == nullptr) continue;
    char* const farewell = FarewellOf(*theirs->second, info.place, member.facts.rank);
    __atomic_store_n(farewell, 1, __ATOMIC_RELEASE);
  }
}

void PeerMemory::Leave(bool is_busy, bool has_failed) {
  if (has_left_) return;
  has_left_ = true;
  waits_ = !has_failed;
  is_kept_ = is_busy;
  if (is_busy) return;
  for (Member& member : members_) {
    // In this order: CUDA does not define what it does if memory is freed that another
    // process has mapped.
    Unmap(member);
    if (IsExchanged(member)) TellOthers(member);
  }
}

void PeerMemory::GiveBack(Member& member) {
  const DeviceArena::Region region = std::exchange(member.region, {});
  if (region.at == 0) return;
  std::function<bool()> is_unused = [] { return true; };
  if (!member.is_shared) {
    // Its stream may be about to zero it.
    CurrentContext current(library_.cuda, member.facts.context);
    const Status zeroed = Wait({kGraceSeconds}, "the end of zeroing", [&] {
      return library_.cuda.EventQuery(member.zeroed) != cuda::kNotReady;
    });
    if (zeroed.failure()) return;
  }
  if (member.is_offered) {
    is_unused = [farewells = farewells_, place = member.facts.place,
                 infos = member.infos, size = member.facts.size] {
      for (int rank = 0; rank < size; ++rank) {
        const Info& info = infos[1 + static_cast<size_t>(rank)];
        if (info.process == infos[0].process) continue;
        char* const farewell = FarewellOf(*farewells, place, rank);
        if (__atomic_load_n(farewell, __ATOMIC_ACQUIRE) != 0) continue;
        const bool is_known =
            info.pid_namespace != 0 && info.pid_namespace == infos[0].pid_namespace;
        if (is_known && HasEnded({static_cast<int64_t>(info.pid), info.start_time})) {
          continue;
        }
        return false;
      }
      return true;
    };
    // They close it at about the same time. Whoever does not is waited for once.
    const double seconds = waits_ ? kLeaveSeconds : 0;
    if (Wait({seconds}, "others that leave", is_unused).failure()) waits_ = false;
  }
  DeviceArena::Of(member.facts.ordinal).GiveBack(library_, region, is_unused);
}

}  // namespace jaxcomm
