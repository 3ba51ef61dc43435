// Device memory that the ranks of a group, of one or several processes of one host,
// have mapped: each owns some, and reaches that of all others. It lies in the arenas of
// the processes (device_arena.h).
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_PEER_MEMORY_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_PEER_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/engines/device_arena.h"
#include "ffi/backends/nccl/library/library.h"
#include "ffi/backends/nccl/library/rank_facts.h"
#include "ffi/base/status.h"
#include "ffi/os/peer_watch.h"
#include "ffi/os/segment.h"

namespace jaxcomm {

class PeerMemory {
 public:
  static constexpr int kMostRanks = 8;

  // `members`: the ranks of this process, by place, with a stream of each. `most_bytes`
  // bounds the arena of a device. `library` must outlive all communicators.
  PeerMemory(const NcclLibrary& library, const std::vector<RankFacts>& members,
             const std::vector<cuda::Stream>& streams, size_t most_bytes);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Has a rank of a group of more than one take `bytes`, and zero the last `zeroed` of
  // them. If it cannot, that is no error: the other processes would wait for this one.
  // They learn of it.
  Status Take(size_t place, size_t bytes, size_t zeroed);
  // Says that a rank here cannot use it, and why, before it is shared.
  void SetUnable(size_t place, const Status& reason);

  // Shows each other's memory to the ranks of the groups that have all ranks here, once
  // all have taken it and their streams have what they write at first; and to those of
  // the others. Every process calls the second. If that fails, Leave() as ever.
  void ShareHere();
  Status Share(NcclParts& parts);

  // Whether all ranks of the group reach each other's memory: then all know it, or
  // none. Else nobody may use it, and reason() says why.
  bool is_shared(size_t place) const { return members_[place].is_shared; }
  const std::string& reason() const { return reason_; }
  // The memory of a rank here; 0 if there is none.
  cuda::Pointer own(size_t place) const { return members_[place].region.at; }
  // Where the memory of a rank of the group lies for a rank here.
  cuda::Pointer of(size_t place, int rank) const {
    return members_[place].mapped[static_cast<size_t>(rank)];
  }
  const NcclLibrary& library() const { return library_; }
  const RankFacts& facts(size_t place) const { return members_[place].facts; }
  size_t size() const { return members_.size(); }
  int64_t device_bytes() const;

  // Unmaps what others own, and tells them afterwards: then they may give it to another
  // communicator, or free it. `is_busy`: a device here may use it still; then it stays
  // as it is for as long as the process lives. What is here goes back with this object,
  // since CUDA may free it only once NCCL has left the streams; or once all others that
  // may have mapped it have left it, too, or have ended. `has_failed`: they may come
  // late or never, so nobody waits for them.
  void Leave(bool is_busy, bool has_failed);

 private:
  // One rank's part of what the ranks of a group exchange.
  struct Info {
    uint64_t host = 0, process = 0;
    uint64_t is_able = 0;  // so far
    uint64_t segment = 0, offset = 0, bytes = 0;
    cuda::IpcHandle handle = {};
    // The process, for the others of its namespace of process ids; 0: unknown.
    uint64_t pid_namespace = 0, pid = 0, start_time = 0;
    // Where it is told that others have left, and the rank's place there.
    char path[64] = {};
    uint64_t nonce = 0, place = 0;
  };

  struct Member {
    RankFacts facts;
    cuda::Stream stream = nullptr;
    cuda::Event zeroed = nullptr;
    DeviceArena::Region region;
    std::vector<cuda::Pointer> mapped;  // by rank; 0: not here
    std::vector<cuda::Pointer> opened;  // segments
    std::vector<Info> infos;            // its own, then the received ones
    // Others may have its handle, and may have mapped it.
    bool is_offered = false;
    bool is_shared = false;
  };

  bool IsHere(const Member& member) const;
  bool IsExchanged(const Member& member) const;
  // Exchanges the infos of groups that have ranks elsewhere.
  Status Exchange(NcclParts& parts);
  // Whether all ranks are able, by the infos received.
  bool AreAble(const Member& member);
  // Puts its handle into the info that is exchanged next.
  void Offer(Member& member);
  bool AttachFarewells(const Member& member);
  void Map(Member& member);
  bool MapOne(Member& member, int rank);
  void Unmap(Member& member);
  void TellOthers(const Member& member);
  void GiveBack(Member& member);
  void CannotShare(std::string reason);

  const NcclLibrary& library_;
  const size_t most_bytes_;
  Info* exchanged_ = nullptr;    // in memory of the host that devices reach
  std::vector<Member> members_;  // by place
  std::string reason_;
  // Host memory to which others write when they have left; and theirs, by process.
  std::shared_ptr<Segment> farewells_;
  std::map<uint64_t, std::shared_ptr<Segment>> farewells_of_;
  bool has_left_ = false, is_kept_ = false, waits_ = true;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_PEER_MEMORY_H_
