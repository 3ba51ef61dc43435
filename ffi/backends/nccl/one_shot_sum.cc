#include "ffi/backends/nccl/one_shot_sum.h"

namespace jaxcomm {
namespace {

constexpr int64_t kWordBytes = 4;

}  // namespace

std::optional<OneShotSum> SumOf(const Step& step, int size) {
  if (step.kind != Step::Kind::kAllReduce || step.count == 0 ||
      step.from % kWordBytes != 0 || step.to % kWordBytes != 0) {
    return std::nullopt;
  }
  const auto count = static_cast<int64_t>(step.count);
  const bool is_mean = step.op == nccl::RedOp::kAvg;
  if (is_mean ? step.type != nccl::Type::kFloat32 : step.op != nccl::RedOp::kSum) {
    return std::nullopt;
  }
  switch (step.type) {
    case nccl::Type::kInt32:
    case nccl::Type::kUint32:
      return OneShotSum{OneShotWord::kInt32, count};
    case nccl::Type::kFloat32:
      return OneShotSum{OneShotWord::kFloat32, count,
                        is_mean ? 1 / static_cast<float>(size) : 1};
    case nccl::Type::kFloat16:
    case nccl::Type::kBfloat16:
      if (count % 2 != 0) return std::nullopt;
      return OneShotSum{step.type == nccl::Type::kFloat16 ? OneShotWord::kFloat16
                                                          : OneShotWord::kBfloat16,
                        count / 2};
    default:
      return std::nullopt;
  }
}

}  // namespace jaxcomm
