// A few bytes of every rank of a group, brought to the host of each.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_EXCHANGE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_EXCHANGE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/queue/local_rank.h"
#include "ffi/base/status.h"
#include "ffi/os/mutex.h"

namespace jaxcomm {

// For one exchange of a rank at a time. Groups of one exchange nothing.
class Exchange {
 public:
  // `most_bytes`: of each rank.
  Exchange(NcclParts& parts, size_t most_bytes)
      : parts_(parts), most_bytes_(most_bytes), items_(parts.ranks.size()) {}
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Makes the memory of the ranks here, unless it is there. What follows requires it.
  Status Prepare();

  // Where the data of a rank lies, for Give() to send: on its device.
  cuda::Pointer own_on_device(size_t place) const { return items_[place].on_device; }
  // Where that of all ranks arrives there, by rank.
  cuda::Pointer gathered_on_device(size_t place) const {
    return items_[place].on_device + most_bytes_;
  }
  // Memory of the host from which it can be copied there.
  void* own(size_t place) const { return items_[place].on_host; }

  // Gives `stream` the exchange of `bytes` of each rank. Requires the launch lock.
  Status Give(const LocalRank& rank, size_t bytes, cuda::Stream stream);
  // The same without bringing it to the host.
  Status Gather(const LocalRank& rank, size_t bytes, cuda::Stream stream);
  // Returns what a rank sent, once the stream has come so far.
  const void* sent_by(int rank, size_t place, size_t bytes) const {
    return items_[place].on_host + most_bytes_ + static_cast<size_t>(rank) * bytes;
  }

  int64_t device_bytes() const;

 private:
  // The rank's own data, then that of all ranks.
  struct Item {
    char* on_host = nullptr;
    cuda::Pointer on_device = 0;
  };

  size_t BytesOf(const LocalRank& rank) const {
    return static_cast<size_t>(1 + rank.facts.size) * most_bytes_;
  }

  NcclParts& parts_;
  const size_t most_bytes_;
  std::vector<Item> items_;  // by place
  std::atomic<bool> is_prepared_{false};
  Mutex preparing_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_EXCHANGE_H_
