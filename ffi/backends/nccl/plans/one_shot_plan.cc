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

// Whether the words fit, and by which way. `sent` is of a rank, by lines.
bool ChooseWay(int64_t part, int64_t sent, int size, OneShotWork* work) {
  work->is_staged = sent * kWordBytes > kMostLineBytes;
  if (!work->is_staged) return part <= OneShotMemory::Lines(size);
  const bool is_hop = work->target != OneShotArguments::kAll;
  return work->is_staged && part <= OneShotMemory::Staged(is_hop ? 1 : size);
}

std::optional<OneShotWork> WorkOf(const Step& step, int size) {
  const bool is_sum = step.kind == Kind::kAllReduce;
  const bool is_added = is_sum || step.kind == Kind::kReduceScatter;
  const bool is_moved = step.kind == Kind::kAllGather || step.kind == Kind::kAllToAll;
  if (!is_added && !is_moved) return std::nullopt;
  OneShotWork work;
  work.leaf = step.leaf;
  work.from = step.from;
  work.to = step.to;
  auto part = static_cast<int64_t>(step.count) / kWordBytes;
  if (is_added) {
    const std::optional<Added> added = AddedBy(step, size);
    if (!added.has_value()) return std::nullopt;
    part = added->count;
    work.word = added->word;
    work.factor = added->factor;
  } else if (step.count % kWordBytes != 0) {
    return std::nullopt;
  }
  const int64_t most = OneShotMemory::kHalfBytes / kWordBytes;
  if (part == 0 || part > most || step.from % kWordBytes != 0 ||
      step.to % kWordBytes != 0) {
    return std::nullopt;
  }
  work.words = static_cast<uint32_t>(part);
  const int64_t sent = part * (size - 1);
  if (is_sum && sent * kWordBytes > kMostLineBytes) {
    // Each rank adds one part, of whole quads.
    constexpr int64_t kQuad = 4;
    part = (part + size * kQuad - 1) / (size * kQuad) * kQuad;
    work.is_shared = true;
  }
  if (!ChooseWay(part, sent, size, &work)) return std::nullopt;
  work.part = static_cast<uint32_t>(part);
  if (work.is_shared) {
    work.from_stride = work.to_stride = work.part;
  } else if (!is_sum) {
    if (step.kind != Kind::kAllGather) {
      work.from_stride = work.part;
      work.words = work.part * static_cast<uint32_t>(size);
    }
    if (is_moved) work.to_stride = work.part;
  }
  return work;
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
std::optional<OneShotWork> HopOf(const Step& one, const Step& other, int size) {
  const Step& send = one.kind == Kind::kSend ? one : other;
  const Step& recv = one.kind == Kind::kSend ? other : one;
  if (send.kind != Kind::kSend || recv.kind != Kind::kRecv || send.leaf != recv.leaf ||
      send.count != recv.count || send.count % kWordBytes != 0 ||
      send.from % kWordBytes != 0 || recv.to % kWordBytes != 0) {
    return std::nullopt;
  }
  OneShotWork work;
  work.leaf = send.leaf;
  work.from = send.from;
  work.to = recv.to;
  work.target = static_cast<uint32_t>(send.peer);
  work.source = static_cast<uint32_t>(recv.peer);
  const auto words = static_cast<int64_t>(send.count) / kWordBytes;
  if (!ChooseWay(words, words, size, &work)) return std::nullopt;
  work.part = work.words = static_cast<uint32_t>(words);
  return work;
}

}  // namespace

std::vector<OneShotWork> MakeOneShotPlan(const Plan& plan, const Steps& steps) {
  std::vector<OneShotWork> works;
  const bool is_hop = IsHop(plan);
  const size_t each = is_hop ? 2 : 1;
  if (plan.size > OneShotArguments::kMostRanks || plan.size < 2 ||
      !steps.local.empty() || steps.grouped.size() % each != 0) {
    return works;
  }
  for (size_t i = 0; i < steps.grouped.size(); i += each) {
    const std::optional<OneShotWork> work =
        is_hop ? HopOf(steps.grouped[i], steps.grouped[i + 1], plan.size)
               : WorkOf(steps.grouped[i], plan.size);
    if (!work.has_value()) return {};
    works.push_back(*work);
  }
  return works;
}

}  // namespace jaxcomm
