// Device memory that the ranks of a group, of one or several processes of one host,
// have mapped: each owns some, and reaches that of all others.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_PEER_MEMORY_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_PEER_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/library/library.h"
#include "ffi/backends/nccl/library/rank_facts.h"
#include "ffi/backends/nccl/queue/local_rank.h"
#include "ffi/base/status.h"

namespace jaxcomm {

// What tells a host, and a process on it, from others. Process ids are not the same in
// all containers of a host.
uint64_t ThisHost();
uint64_t ThisProcess();

class PeerMemory {
 public:
  static constexpr int kMostRanks = 8;

  // Has a rank of each group of more than one rank allocate `bytes`, and zero the last
  // `zeroed` of them.
  static ErrorOr<std::unique_ptr<PeerMemory>> Create(NcclParts& parts, size_t bytes,
                                                     size_t zeroed);
  ~PeerMemory();

  // Shows the ranks of a group each other's memory. Every process calls it.
  Status Share();

  // Says, before Share(), that a rank here cannot use it, and why.
  void SetUnable(size_t place, const Status& reason);

  // Whether all ranks of the group reach each other's memory: then all know it, or
  // none. Else nobody may use it, and reason() says why.
  bool is_shared(size_t place) const { return members_[place].is_shared; }
  const std::string& reason() const { return reason_; }
  // The memory of a rank here; 0 if there is none.
  cuda::Pointer own(size_t place) const { return members_[place].own; }
  // Where the memory of a rank of the group lies for a rank here.
  cuda::Pointer of(size_t place, int rank) const {
    return members_[place].mapped[static_cast<size_t>(rank)];
  }
  int64_t device_bytes() const;

  // Unmaps what others own. Requires that nothing on a device uses it any more.
  void Unmap();
  // Leaves the own memory allocated for as long as the process lives: others may use
  // it.
  void KeepOwn() { keeps_own_ = true; }

 private:
  // One rank's part of what the ranks of a group exchange.
  struct Info {
    uint64_t host = 0, process = 0;
    uint64_t is_able = 0;  // so far
    cuda::IpcHandle handle = {};
  };

  struct Member {
    RankFacts facts;
    cuda::Pointer own = 0;
    std::vector<cuda::Pointer> mapped;  // by rank; 0: not here
    std::vector<cuda::Pointer> opened;
    Info* infos = nullptr;  // its own, then the received ones, in the host's memory
    bool is_shared = false;
  };

  PeerMemory(NcclParts& parts, size_t bytes) : parts_(parts), bytes_(bytes) {}

  Status Allocate(Member& member, size_t zeroed);
  bool IsOfSeveralProcesses(const Member& member) const;
  // Exchanges the infos of all members that share something.
  Status Exchange();
  // Whether all ranks are able, by the infos received.
  bool AreAble(const Member& member);
  void Map(Member& member);
  bool MapOne(Member& member, int rank);
  void CannotShare(std::string reason);

  NcclParts& parts_;
  const size_t bytes_;
  void* infos_ = nullptr;
  std::vector<Member> members_;  // by place
  std::string reason_;
  bool keeps_own_ = false;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ENGINES_PEER_MEMORY_H_
