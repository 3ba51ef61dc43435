// CPU devices in the place of GPUs: what the backend asks of a stand-in beyond NCCL.
//
// One order of operations for the ranks of a process whose devices are CPU devices.
// NCCL takes operations in the order in which they are enqueued, which must be the same
// on all ranks. XLA:GPU runs a program's calls in one order on every device; XLA:CPU
// does not where calls are independent. When the stand-in for NCCL serves CPU devices,
// the first device leads, and the others hold their calls back until it has come to
// them: since it came to them in this order, none of them can depend on a later one.
// The order is of all communicators of a world, since those that share resources wait
// for each other.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/library/test_double.h"
#include "tests/doubles/nccl/controls.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/failed.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {

class HostOrder : public std::enable_shared_from_this<HostOrder> {
 public:
  using Tag = std::pair<int64_t, uint64_t>;  // run, call site

  explicit HostOrder(size_t members) : members_(members) {}

  // Calls `issue` when it is the member's turn, on a thread of the member, which may
  // wait for other ranks there. What is refused meanwhile does not wait for its turn.
  void Arrive(size_t member, Tag tag, std::function<bool()> is_refused,
              std::function<void()> issue) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (member == 0) order_.push_back(tag);
    members_[member].held.push_back({tag, std::move(is_refused), std::move(issue)});
    for (Member& each : members_) Issue(each);
    if (!HoldsAny() || std::exchange(has_looker_, true)) return;
    std::thread([self = shared_from_this()] { self->LookForRefused(); }).detach();
  }

 private:
  struct Held {
    Tag tag;
    std::function<bool()> is_refused;
    std::function<void()> issue;
  };

  struct Member {
    size_t next = 0;  // in order_
    std::vector<Held> held;
    std::deque<std::function<void()>> issued;
    bool has_thread = false;
  };

  bool HoldsAny() const {
    return std::any_of(members_.begin(), members_.end(),
                       [](const Member& member) { return !member.held.empty(); });
  }

  void LookForRefused() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (HoldsAny()) {
      for (Member& member : members_) {
        const auto refused =
            std::stable_partition(member.held.begin(), member.held.end(),
                                  [](const Held& held) { return !held.is_refused(); });
        for (auto held = refused; held != member.held.end(); ++held) {
          Run(member, std::move(held->issue));
        }
        member.held.erase(refused, member.held.end());
      }
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock.lock();
    }
    has_looker_ = false;
  }

  void Run(Member& member, std::function<void()> issue) {
    member.issued.push_back(std::move(issue));
    if (std::exchange(member.has_thread, true)) return;
    std::thread([self = shared_from_this(), &member] {
      std::unique_lock<std::mutex> lock(self->mutex_);
      while (!member.issued.empty()) {
        std::function<void()> work = std::move(member.issued.front());
        member.issued.pop_front();
        lock.unlock();
        work();
        work = nullptr;
        lock.lock();
      }
      member.has_thread = false;
    }).detach();
  }

  void Issue(Member& member) {
    bool found = true;
    while (found && member.next < order_.size()) {
      found = false;
      for (size_t i = 0; i < member.held.size(); ++i) {
        if (member.held[i].tag != order_[member.next]) continue;
        Run(member, std::move(member.held[i].issue));
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
  bool has_looker_ = false;
};

namespace {

constexpr size_t kMostDevices = 64;

struct Orders {
  std::map<const void*, std::shared_ptr<HostOrder>> of;
};

std::shared_ptr<HostOrder> OrderOf(const void* world) {
  Locked<Orders> orders;
  std::shared_ptr<HostOrder>& order = orders->of[world];
  if (order == nullptr) order = std::make_shared<HostOrder>(kMostDevices);
  return order;
}

void Arrive(const void* world, size_t member, int64_t run, uint64_t call_site,
            bool (*is_refused)(void*), void (*issue)(void*), void* argument) {
  OrderOf(world)->Arrive(
      member, {run, call_site}, [=] { return is_refused(argument); },
      [=] { issue(argument); });
}

void Forget(const void* world) {
  Locked<Orders> orders;
  orders->of.erase(world);
}

// Runs what waited for one device. A program that goes on there may wait for other
// devices, which a stream's thread must not.
class Completer {
 public:
  static Completer& Of(int device) {
    static auto& mutex = *new std::mutex;
    static auto& known = *new std::map<int, Completer*>;
    std::lock_guard<std::mutex> lock(mutex);
    Completer*& completer = known[device];
    if (completer == nullptr) completer = new Completer;
    return *completer;
  }

  void Run(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    if (queue_.size() > idle_) {
      ++idle_;
      std::thread([this] { Loop(); }).detach();
    }
    changed_.notify_one();
  }

 private:
  // Of as many threads as have work that waits at once.
  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      --idle_;
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
      ++idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0;  // threads that wait for work, or are about to
};

void WhenDone(void* stream, void (*done)(void*, int), void* argument) {
  const auto found = FindStream(stream, kNoDevice);
  const auto call = [device = found->device(), done, argument] {
    const cuda::Result error = DeviceFailure();
    Completer::Of(device).Run([done, argument, error] { done(argument, error); });
  };
  found->Enqueue(call, call);
}

}  // namespace
}  // namespace jaxcomm::fake

const jaxcomm::TestDouble* jaxcommTestDouble() {
  static constexpr jaxcomm::TestDouble kDouble = {jaxcommFakeHas, jaxcomm::fake::Arrive,
                                                  jaxcomm::fake::Forget,
                                                  jaxcomm::fake::WhenDone};
  return &kDouble;
}
