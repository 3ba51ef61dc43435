// Small sums in one step, between the devices of one host: every rank writes what it
// has into the memory of all others, and adds what it finds in its own.
//
// NCCL's call costs the host more than the GPU needs for such a sum, and in a chain of
// them that is what counts. This is one launch of a kernel (kernels/kernels.h).
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/backends/nccl/kernels/device_kernels.h"
#include "ffi/backends/nccl/kernels/kernels.h"
#include "ffi/backends/nccl/library.h"
#include "ffi/backends/nccl/peer_access.h"
#include "ffi/backends/nccl/steps.h"
#include "ffi/core/communicator.h"
#include "ffi/core/status.h"

namespace jaxcomm {

class OneShot {
 public:
  // What the ranks of a group tell each other.
  struct Card {
    uint64_t host = 0, process = 0;
    uint64_t is_able = 0;  // so far
    cuda::IpcHandle inbox = {};
  };

  // Members: this process's ranks. To be used once the streams, one of each member,
  // have come to their ends, and its groups have agreed. `flag`: of the sum before the
  // first.
  static Status Create(const NcclLibrary& library,
                       const std::vector<PeerMember>& members,
                       const std::vector<cuda::Stream>& streams,
                       std::unique_ptr<OneShot>* one_shot, uint32_t flag = 0);
  ~OneShot();

  // Waits for what is given to streams, and closes other processes' inboxes: before
  // these free them, if they do so at about the same time.
  void Leave();

  // A group takes part if all of its ranks can: then all do, or none. Where they are of
  // one process that is known; others send all their cards twice, to open what they
  // find on them in between. Cards lie in memory that devices reach.
  bool NeedsCards(size_t member) const;
  Card* card(size_t member) { return lanes_[member].cards; }
  // By rank.
  Card* received_cards(size_t member) { return lanes_[member].cards + 1; }
  void Open(size_t member);
  void Agree(size_t member);

  // Whether the steps are sums for it: the same for every rank of a group. Those after
  // four thousand million are not, since flags are not used again.
  bool Takes(const Steps& steps, size_t member) const;

  // Gives `stream` the sums. By one thread at a time for each member.
  Status Launch(const Steps& steps, const Call& call, size_t member,
                cuda::Stream stream);

  // Ends what waits for other ranks, without a result, now and from now on.
  void Stop();

  int64_t device_bytes() const;
  // Why some group does not take part; empty if all do that have more than one rank.
  const std::string& reason() const { return reason_; }

 private:
  // What devices reach of the host's memory.
  struct Shared;

  struct Lane {
    PeerMember member;
    std::shared_ptr<const DeviceKernels> kernels;  // null: the rank cannot take part
    cuda::Function sums[kNumOneShotWords] = {};
    cuda::Pointer inbox = 0;
    std::vector<cuda::Pointer> opened;
    Card* cards = nullptr;
    bool takes_part = false;
    // The last sum, and the stream it was given to: sums keep their order.
    cuda::Event last = nullptr;
    cuda::Stream stream = nullptr;
    bool is_lost = false;  // `last` does not stand for the last sum
    OneShotArguments arguments;
  };

  explicit OneShot(const NcclLibrary& library) : library_(library) {}

  Status LoadKernels(Lane& lane);
  void CannotTakePart(std::string reason);
  Status Allocate(Lane& lane);
  // Whether all ranks can take part so far, by the cards received.
  bool AreAble(const Lane& lane);
  // Whether it has a place for every rank's inbox now.
  bool FindInboxes(Lane& lane);
  // Whether all sums have run, in some seconds.
  bool IsIdleSoon();

  const NcclLibrary& library_;
  Shared* shared_ = nullptr;
  std::atomic<bool> is_stopped_{false};
  bool keeps_inboxes_ = false;
  std::optional<bool> is_idle_;  // known once it has left
  std::string reason_;
  std::vector<Lane> lanes_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_H_
