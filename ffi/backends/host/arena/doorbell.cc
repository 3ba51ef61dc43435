#include "ffi/backends/host/arena/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace jaxcomm {

void Doorbell::FallAsleep(bool is_idle) {
  asleep_.store(is_idle ? kIdle : kWaiting, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Doorbell::Sleep(uint32_t seen, double seconds) {
  timespec timeout;
  timeout.tv_sec = static_cast<time_t>(seconds);
  timeout.tv_nsec =
      static_cast<long>((seconds - static_cast<double>(timeout.tv_sec)) * 1e9);
  syscall(SYS_futex, &rings_, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void Doorbell::Ring() {
  if (asleep_.load(std::memory_order_relaxed) != kWaiting) return;
  rings_.fetch_add(1, std::memory_order_release);
  Wake();
}

void Doorbell::RingOwn() {
  rings_.fetch_add(1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_relaxed) != kAwake) Wake();
}

void Doorbell::Wake() {
  syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace jaxcomm
