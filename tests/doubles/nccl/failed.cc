#include "tests/doubles/nccl/failed.h"

#include <atomic>

namespace jaxcomm::fake {
namespace {

std::atomic<cuda::Result> failure{cuda::kSuccess};

}  // namespace

void FailDevices(cuda::Result error) {
  cuda::Result none = cuda::kSuccess;
  failure.compare_exchange_strong(none, error);
}

cuda::Result DeviceFailure() { return failure.load(); }

}  // namespace jaxcomm::fake
