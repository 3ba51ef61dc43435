// How often a rank was called, and for how much.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_CALL_COUNTS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_CALL_COUNTS_H_

#include <atomic>
#include <cstdint>

#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

// On cache lines of its own: ranks call at the same time, each on a thread of its own.
class alignas(64) CallCounts {
 public:
  enum class Kind { kOrdinary, kSymmetric, kCopied, kOneShot };

  void Add(const CallSite& site, Kind kind = Kind::kOrdinary) {
    Increase(calls_[static_cast<int>(site.kind())], 1);
    Increase(bytes_, site.operand_bytes());
    Increase(of_kind_[static_cast<int>(kind)], 1);
  }

  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  int64_t of(Kind kind) const {
    return of_kind_[static_cast<int>(kind)].load(std::memory_order_relaxed);
  }

  // Adds the calls of each collective to the stats of a communicator.
  void AddTo(CommunicatorStats* stats) const {
    for (int i = 0; i < Plan::kKinds; ++i) {
      const int64_t count = calls_[i].load(std::memory_order_relaxed);
      if (count > 0) stats->calls.emplace_back(KindName(Plan::Kind(i)), count);
    }
  }

 private:
  static void Increase(std::atomic<int64_t>& count, int64_t by) {
    count.fetch_add(by, std::memory_order_relaxed);
  }

  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> calls_[Plan::kKinds] = {};
  std::atomic<int64_t> of_kind_[4] = {};
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_CALL_COUNTS_H_
