// One order of operations for the ranks of a process whose devices are CPU devices.
//
// NCCL takes operations in the order in which they are enqueued, which must be the same
// on all ranks. XLA:GPU runs a program's calls in one order on every device; XLA:CPU
// does not where calls are independent. When the stand-in for NCCL serves CPU devices,
// the first device leads, and the others hold their calls back until it has come to
// them: since it came to them in this order, none of them can depend on a later one.
// The order is of all communicators of a world, since those that share resources wait
// for each other.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_HOST_ORDER_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_HOST_ORDER_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace jaxcomm::fake {

class HostOrder {
 public:
  using Tag = std::pair<int64_t, uint64_t>;  // run, call site

  explicit HostOrder(size_t members) : members_(members) {}

  // Calls `issue` when it is the member's turn, which may be now, or in another's call.
  // `owner`: the communicator.
  void Arrive(size_t member, const void* owner, Tag tag, std::function<void()> issue) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (member == 0) order_.push_back(tag);
    members_[member].held.push_back({owner, tag, std::move(issue)});
    for (Member& each : members_) Issue(each);
  }

  // Calls those of `owner` that are held back, in any order: it has failed.
  void Abandon(const void* owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Member& member : members_) {
      for (Held& held : member.held) {
        if (held.owner == owner) held.issue();
      }
      const auto is_its = [&](const Held& held) { return held.owner == owner; };
      member.held.erase(std::remove_if(member.held.begin(), member.held.end(), is_its),
                        member.held.end());
    }
  }

 private:
  struct Held {
    const void* owner;
    Tag tag;
    std::function<void()> issue;
  };

  struct Member {
    size_t next = 0;  // in order_
    std::vector<Held> held;
  };

  void Issue(Member& member) {
    bool found = true;
    while (found && member.next < order_.size()) {
      found = false;
      for (size_t i = 0; i < member.held.size(); ++i) {
        if (member.held[i].tag != order_[member.next]) continue;
        member.held[i].issue();
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

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_HOST_ORDER_H_
