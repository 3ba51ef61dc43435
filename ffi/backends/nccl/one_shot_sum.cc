#include "ffi/backends/nccl/one_shot_sum.h"

namespace jaxcomm {
namespace {

constexpr int64_t kWordBytes = 4;

}  // namespace

std::optional<OneShotSum> SumOf(const Step& step, int size) {
  if (step.kind != Step::Kind::kAllReduce || step.count == 0 ||
      step.count > 2 * OneShotArguments::Capacity(size) ||
      step.from % kWordBytes != 0 || step.to % kWordBytes != 0) {
    return std::nullopt;
  }
  const auto count = static_cast<uint32_t>(step.count);
  const bool is_mean = step.op == nccl::RedOp::kAvg;
  if (is_mean ? step.type != nccl::Type::kFloat32 : step.op != nccl::RedOp::kSum) {
    return std::nullopt;
  }
  std::optional<OneShotSum> sum;
  switch (step.type) {
    case nccl::Type::kInt32:
    case nccl::Type::kUint32:
      sum = {OneShotWord::kInt32, count};
      break;
    case nccl::Type::kFloat32:
      sum = {OneShotWord::kFloat32, count, is_mean ? 1 / static_cast<float>(size) : 1};
      break;
    case nccl::Type::kFloat16:
    case nccl::Type::kBfloat16:
      if (count % 2 != 0) return std::nullopt;
      sum = {step.type == nccl::Type::kFloat16 ? OneShotWord::kFloat16
                                               : OneShotWord::kBfloat16,
             count / 2};
      break;
    default:
      return std::nullopt;
  }
  if (sum->words > OneShotArguments::Capacity(size)) return std::nullopt;
  return sum;
}

}  // namespace jaxcomm
