#include "ffi/backends/nccl/plans/one_shot_plan.h"

#include <algorithm>
#include <optional>

#include "ffi/backends/nccl/plans/engine_choice.h"

namespace jaxcomm {
namespace {

using Kind = Step::Kind;

constexpr int64_t kWordBytes = 4;

// What is added: `count` is of elements on the way in, of words on the way out.
struct Added {
  OneShotWord word;
  int64_t count;
  float factor = 1;
};

std::optional<Added> AddedBy(const Step& step, int size) {
  const auto count = static_cast<int64_t>(step.count);
  const bool is_mean = step.op == nccl::RedOp::kAvg;
  if (is_mean ? step.type != nccl::Type::kFloat32 : step.op != nccl::RedOp::kSum) {
    return std::nullopt;
  }
  switch (step.type) {
    case nccl::Type::kInt32:
    case nccl::Type::kUint32:
      return Added{OneShotWord::kInt32, count};
    case nccl::Type::kFloat32:
      return Added{OneShotWord::kFloat32, count,
                   is_mean ? 1 / static_cast<float>(size) : 1};
    case nccl::Type::kFloat16:
    case nccl::Type::kBfloat16:
      if (count % 2 != 0) return std::nullopt;
      return Added{step.type == nccl::Type::kFloat16 ? OneShotWord::kFloat16
                                                     : OneShotWord::kBfloat16,
                   count / 2};
    default:
      return std::nullopt;
  }
}

// Words that the staging kernel moves at once.
constexpr int64_t kQuad = 4;

bool IsOfWords(const OneShotWork& work) {
  return work.part > 0 && work.from % kWordBytes == 0 && work.to % kWordBytes == 0;
}

// Whether quads will do, which boxes of `most` words can take.
bool CanBeStaged(const OneShotWork& work, uint32_t most) {
  return work.part <= most && (work.part | work.words) % kQuad == 0 &&
         (work.from | work.to) % (kQuad * kWordBytes) == 0;
}

std::optional<OneShotWork> SumOf(const Step& step, int size) {
  const std::optional<Added> added = AddedBy(step, size);
  if (!added.has_value() || added->count > kMostStagedBytes / kWordBytes) {
    return std::nullopt;
  }
  OneShotWork work;
  work.leaf = step.leaf;
  work.from = step.from;
  work.to = step.to;
  work.word = added->word;
  work.factor = added->factor;
  work.part = work.words = static_cast<uint32_t>(added->count);
  if (!IsOfWords(work)) return std::nullopt;
  if (added->count * kWordBytes * (size - 1) <= kMostLineBytesOfSum) return work;
  // Each rank adds one part, of whole quads.
  const auto ranks = static_cast<uint32_t>(size);
  work.is_staged = work.is_shared = true;
  work.part = (work.words + ranks * kQuad - 1) / (ranks * kQuad) * kQuad;
  work.from_stride = work.to_stride = work.part;
  if (!CanBeStaged(work, OneShotMemory::Staged(size))) return std::nullopt;
  return work;
}

// What each rank gets in one step.
std::optional<OneShotWork> PartsOf(const Step& step, int size) {
  OneShotWork work;
  work.leaf = step.leaf;
  work.from = step.from;
  work.to = step.to;
  auto part = static_cast<int64_t>(step.count) / kWordBytes;
  if (step.kind == Kind::kReduceScatter) {
    const std::optional<Added> added = AddedBy(step, size);
    if (!added.has_value()) return std::nullopt;
    part = added->count;
    work.word = added->word;
    work.factor = added->factor;
  } else if (step.count % kWordBytes != 0) {
    return std::nullopt;
  }
  if (part > kMostStagedBytes / kWordBytes) return std::nullopt;
  work.part = work.words = static_cast<uint32_t>(part);
  if (!IsOfWords(work)) return std::nullopt;
  if (step.kind != Kind::kAllGather) {
    work.from_stride = work.part;
    work.words = work.part * static_cast<uint32_t>(size);
  }
  if (step.kind != Kind::kReduceScatter) work.to_stride = work.part;
  work.is_staged = part * kWordBytes * (size - 1) > kMostLineBytes;
  if (work.is_staged && !CanBeStaged(work, OneShotMemory::Staged(size))) {
    return std::nullopt;
  }
  return work;
}

std::optional<OneShotWork> WorkOf(const Step& step, int size) {
  switch (step.kind) {
    case Kind::kAllReduce:
      return SumOf(step, size);
    case Kind::kReduceScatter:
    case Kind::kAllGather:
    case Kind::kAllToAll:
      return PartsOf(step, size);
    default:
      return std::nullopt;
  }
}

// Whether all ranks send to another one and receive from another one.
bool IsHop(const Plan& plan) {
  if (plan.kind != Plan::Kind::kPermute) return false;
  std::vector<bool> sends(plan.source_of.size());
  for (size_t rank = 0; rank < plan.source_of.size(); ++rank) {
    const int source = plan.source_of[rank];
    if (source < 0 || source == static_cast<int>(rank)) return false;
    sends[static_cast<size_t>(source)] = true;
  }
  return std::all_of(sends.begin(), sends.end(), [](bool each) { return each; });
}

// Steps of a hop are a send and a receive of each leaf, in whichever order.
std::optional<OneShotWork> HopOf(const Step& one, const Step& other) {
  const Step& send = one.kind == Kind::kSend ? one : other;
  const Step& recv = one.kind == Kind::kSend ? other : one;
  if (send.kind != Kind::kSend || recv.kind != Kind::kRecv || send.leaf != recv.leaf ||
      send.count != recv.count || send.count % kWordBytes != 0 ||
      static_cast<int64_t>(send.count) > kMostStagedBytes) {
    return std::nullopt;
  }
  OneShotWork work;
  work.leaf = send.leaf;
  work.from = send.from;
  work.to = recv.to;
  work.target = static_cast<uint32_t>(send.peer);
  work.source = static_cast<uint32_t>(recv.peer);
  work.part = work.words = static_cast<uint32_t>(send.count / kWordBytes);
  if (!IsOfWords(work)) return std::nullopt;
  work.is_staged = static_cast<int64_t>(send.count) > kMostLineBytes;
  // A hop has a half for itself.
  if (work.is_staged && !CanBeStaged(work, OneShotMemory::Staged(1))) {
    return std::nullopt;
  }
  return work;
}

}  // namespace

std::vector<OneShotWork> MakeOneShotPlan(const Plan& plan, const Steps& steps) {
  std::vector<OneShotWork> works;
  const bool is_hop = IsHop(plan);
  const size_t each = is_hop ? 2 : 1;
  if (plan.size > OneShotArguments::kMostRanks || plan.size < 2 ||
      !steps.local.empty() || !steps.behind.empty() ||
      steps.grouped.size() % each != 0) {
    return works;
  }
  const auto is_plain = [](const Step& step) {
    return step.rows == 1 && step.from_room < 0 && step.to_room < 0;
  };
  if (!std::all_of(steps.grouped.begin(), steps.grouped.end(), is_plain)) return works;
  for (size_t i = 0; i < steps.grouped.size(); i += each) {
    const std::optional<OneShotWork> work =
        is_hop ? HopOf(steps.grouped[i], steps.grouped[i + 1])
               : WorkOf(steps.grouped[i], plan.size);
    if (!work.has_value()) return {};
    works.push_back(*work);
  }
  return works;
}

}  // namespace jaxcomm
