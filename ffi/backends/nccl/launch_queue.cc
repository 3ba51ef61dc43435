#include "ffi/backends/nccl/launch_queue.h"

namespace jaxcomm {

void LaunchQueue::Refresh() {
  CurrentContext current(library_.cuda, facts_.context);
  in_flight_.Refresh();
  if (more_ != nullptr) more_->Refresh();
}

InFlight::Overdue LaunchQueue::Poll(std::chrono::duration<double> patience) {
  CurrentContext current(library_.cuda, facts_.context);
  const auto now = InFlight::Clock::now();
  InFlight::Overdue overdue = in_flight_.Poll(now, patience);
  if (overdue.found || more_ == nullptr) return overdue;
  const InFlight::Overdue more = more_->Poll(now, patience);
  return more.found ? more : overdue;
}

InFlight::Overdue LaunchQueue::First() {
  CurrentContext current(library_.cuda, facts_.context);
  InFlight::Overdue first = in_flight_.First();
  if (!first.found && more_ != nullptr) first = more_->First();
  return first;
}

void LaunchQueue::Fail() {
  in_flight_.Fail();
  if (more_ != nullptr) more_->Fail();
}

}  // namespace jaxcomm
