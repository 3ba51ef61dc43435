// A kernel's threads on the host: see grid.h.
#include "tests/doubles/nccl/grid.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <thread>
#include <vector>

#include "tests/doubles/nccl/failed.h"

namespace jaxcomm::fake {
namespace {

constexpr unsigned kMostBlocks = 2;
constexpr unsigned kMostThreads = 4;  // of all blocks
constexpr auto kMisalignedAddress = static_cast<cuda::Result>(716);

// Ends the thread of a kernel on a device that failed.
struct DeviceFailed {};

}  // namespace

// The barrier of a block's threads.
class Block {
 public:
  explicit Block(unsigned threads) : threads_(threads) {}

  bool Wait(bool value) {
    std::unique_lock<std::mutex> lock(mutex_);
    any_ |= value;
    if (++arrived_ < threads_) {
      const unsigned turn = turn_;
      changed_.wait(lock, [&] { return turn_ != turn || is_abandoned_; });
      if (turn_ == turn) throw DeviceFailed();
      // Stays until this thread is at the next barrier, without which nobody passes it.
      return result_;
    }
    result_ = any_;
    any_ = false;
    arrived_ = 0;
    ++turn_;
    changed_.notify_all();
    return result_;
  }

  // A thread of it has ended before its time.
  void Abandon() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_abandoned_ = true;
    changed_.notify_all();
  }

 private:
  const unsigned threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned arrived_ = 0, turn_ = 0;
  bool any_ = false, result_ = false, is_abandoned_ = false;
};

thread_local DeviceThread this_thread;

namespace {

void AcquireWhatItRead() {
  for (const uint32_t* from : this_thread.read) __atomic_load_n(from, __ATOMIC_ACQUIRE);
  this_thread.read.clear();
}

}  // namespace

void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  blocks = std::min(blocks, kMostBlocks);
  threads = std::min(threads, kMostThreads / blocks);
  std::deque<Block> shared;
  for (unsigned block = 0; block < blocks; ++block) shared.emplace_back(threads);
  const auto run = [&](unsigned number) {
    const unsigned block = number / threads;
    this_thread = {{number % threads}, {block}, {threads}, {blocks}, &shared[block]};
    try {
      kernel();
      AcquireWhatItRead();
    } catch (const DeviceFailed&) {
      shared[block].Abandon();
    }
  };
  std::vector<std::thread> others;
  for (unsigned number = 1; number < blocks * threads; ++number) {
    others.emplace_back(run, number);
  }
  run(0);
  for (std::thread& other : others) other.join();
}

bool WaitForBlock(bool value) { return this_thread.shared->Wait(value); }

void Polls() {
  if (DeviceFailure() != cuda::kSuccess) throw DeviceFailed();
  // A thread that it waits for may be on no core. Where there are many more threads
  // than cores, one that gives up its core at every turn gets it back milliseconds
  // later.
  const unsigned polls = ++this_thread.polls;
  if (polls < 16 || polls % 128 == 0) std::this_thread::yield();
  if (polls % 4096 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

void Polls(const void* address) {
  // A loop reads the words of a few ranks in turn.
  constexpr ptrdiff_t kLast = 8;
  auto& read = this_thread.read;
  const auto* const word = static_cast<const uint32_t*>(address);
  const auto last = read.end() - std::min<ptrdiff_t>(kLast, read.end() - read.begin());
  if (std::find(last, read.end(), word) == read.end()) read.push_back(word);
  Polls();
}

void Fault() {
  FailDevices(kMisalignedAddress);
  throw DeviceFailed();
}

}  // namespace jaxcomm::fake
