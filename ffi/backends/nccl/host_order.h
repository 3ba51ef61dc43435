// One order of operations for the ranks of a process whose devices are CPU devices.
//
// NCCL takes operations in the order in which they are enqueued, which must be the same
// on all ranks. XLA:GPU runs a program's calls in one order on every device; XLA:CPU
// does not where calls are independent. When the stand-in for NCCL serves CPU devices,
// the first rank of a group leads, and the others hold their calls back until it has
// come to them: since it came to them in this order, none of them can depend on a later
// one.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_HOST_ORDER_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_HOST_ORDER_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace jaxcomm {

class HostOrder {
 public:
  using Tag = std::pair<int64_t, uint64_t>;  // run, call site

  explicit HostOrder(int members) : members_(members) {}

  // Calls `issue` when it is the member's turn, which may be now, or in another's call.
  void Arrive(int member, Tag tag, std::function<void()> issue) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (member == 0) order_.push_back(tag);
    members_[member].held.emplace_back(tag, std::move(issue));
    for (Member& each : members_) Issue(each);
  }

  // Calls all that are held back, in any order: the communicator has failed.
  void Abandon() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Member& member : members_) {
      for (auto& [tag, issue] : member.held) issue();
      member.held.clear();
    }
  }

 private:
  struct Member {
    size_t next = 0;  // in order_
    std::vector<std::pair<Tag, std::function<void()>>> held;
  };

  void Issue(Member& member) {
    bool found = true;
    while (found && member.next < order_.size()) {
      found = false;
      for (size_t i = 0; i < member.held.size(); ++i) {
        if (member.held[i].first != order_[member.next]) continue;
        member.held[i].second();
        member.held.erase(member.held.begin() + static_cast<ptrdiff_t>(i));
        ++member.next;
        found = true;
        break;
      }
    }
  }

  std::mutex mutex_;
  std::vector<Tag> order_;  // grows by a few bytes a call: it serves tests
  std::vector<Member> members_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_HOST_ORDER_H_
