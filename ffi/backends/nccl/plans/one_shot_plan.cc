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

// What each rank gets in one step, by lines or added.
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
  if (!work.is_staged) return work;
  const bool is_sum = step.kind == Kind::kReduceScatter;
  if (!is_sum || !CanBeStaged(work, OneShotMemory::Staged(size))) return std::nullopt;
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
std::optional<OneShotWork> HopOf(const Step& one, const Step& other, int size) {
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
  // The more ranks, the fewer lines has each.
  work.is_staged =
      work.part > std::min(static_cast<uint32_t>(kMostLineBytes / kWordBytes),
                           OneShotMemory::Lines(size));
  // A hop has a half for itself.
  if (work.is_staged && !CanBeStaged(work, OneShotMemory::Staged(1))) {
    return std::nullopt;
  }
  return work;
}

std::vector<OneShotWork> WorksOf(const Plan& plan, const Steps& steps) {
  std::vector<OneShotWork> works;
  const bool is_hop = IsHop(plan);
  const size_t each = is_hop ? 2 : 1;
  if (!steps.local.empty() || !steps.behind.empty() ||
      steps.grouped.size() % each != 0) {
    return works;
  }
  const auto is_plain = [](const Step& step) {
    return step.rows == 1 && step.from_room < 0 && step.to_room < 0;
  };
  if (!std::all_of(steps.grouped.begin(), steps.grouped.end(), is_plain)) return works;
  for (size_t i = 0; i < steps.grouped.size(); i += each) {
    const std::optional<OneShotWork> work =
        is_hop ? HopOf(steps.grouped[i], steps.grouped[i + 1], plan.size)
               : WorkOf(steps.grouped[i], plan.size);
    if (!work.has_value()) return {};
    works.push_back(*work);
  }
  return works;
}

// The words of `bytes`, if they are whole quads and can be counted.
std::optional<uint32_t> Quads(int64_t bytes) {
  constexpr int64_t kQuadBytes = kQuad * kWordBytes;
  if (bytes % kQuadBytes != 0 || bytes / kWordBytes > kMostExchangedWords) {
    return std::nullopt;
  }
  return static_cast<uint32_t>(bytes / kWordBytes);
}

// A leaf of an all_gather or all_to_all. Of the two ways in which a buffer can hold
// what is of one rank, one has rows of `middle` times as many elements.
std::optional<ExchangedArray> ExchangedOf(const CallSite& site, const Plan& plan,
                                          int leaf) {
  const Plan::Division& division = plan.leaves[leaf];
  const bool is_gather = plan.kind == Plan::Kind::kAllGather;
  const auto bytes = static_cast<int64_t>(site.results()[leaf].element_bytes);
  const auto inner = Quads(division.inner * bytes);
  const auto long_row = Quads(division.inner * division.middle * bytes);
  const auto part = Quads(division.outer * division.middle * division.inner * bytes);
  const auto whole = Quads(site.results()[leaf].bytes());
  if (!inner || !long_row || !part || !whole || *part == 0) return std::nullopt;
  const auto size = static_cast<uint32_t>(plan.size);
  // Words from the part of a rank to the next are those of a row.
  const ExchangeArguments::Rows of_short = {*inner, *inner * size};
  const ExchangeArguments::Rows of_long = {*long_row, *long_row * size};
  ExchangedArray array;
  array.leaf = leaf;
  array.part = *part;
  array.from = division.split_first ? of_long : of_short;
  array.to = is_gather || !division.split_first ? of_long : of_short;
  if (is_gather) {
    array.from = {*part, *part};
  } else {
    array.from_stride = array.from.words;
  }
  array.to_stride = array.to.words;
  for (ExchangeArguments::Rows* rows : {&array.from, &array.to}) {
    if (rows->words == array.part) rows->pitch = rows->words;
  }
  return array;
}

// Divides what is staged into chunks that boxes of `capacity` words take.
void Divide(uint32_t capacity, OneShotPlan* plan) {
  for (ExchangedArray& array : plan->exchanged) {
    const uint32_t chunks = (array.part + capacity - 1) / capacity;
    array.chunk = (array.part + chunks * kQuad - 1) / (chunks * kQuad) * kQuad;
    plan->chunks += (array.part + array.chunk - 1) / array.chunk;
  }
  plan->chunks |= 1;
}

}  // namespace

bool OneShotPlan::is_staged() const {
  return !exchanged.empty() ||
         std::any_of(works.begin(), works.end(),
                     [](const OneShotWork& work) { return work.is_staged; });
}

int64_t OneShotPlan::exchanged_bytes(int size) const {
  int64_t bytes = 0;
  for (const ExchangedArray& array : exchanged) {
    bytes += int64_t{array.part} * kWordBytes * (size - 1);
  }
  return bytes;
}

bool OneShotPlan::has_gaps() const {
  return std::any_of(exchanged.begin(), exchanged.end(), [](const auto& array) {
    return array.from.words != array.from.pitch || array.to.words != array.to.pitch;
  });
}

OneShotPlan MakeOneShotPlan(const CallSite& site, const Plan& plan,
                            const Steps& steps) {
  OneShotPlan made;
  if (plan.size > OneShotArguments::kMostRanks || plan.size < 2) return made;
  made.works = WorksOf(plan, steps);
  const bool is_exchange =
      plan.kind == Plan::Kind::kAllGather || plan.kind == Plan::Kind::kAllToAll;
  if (!made.works.empty() || !is_exchange ||
      plan.leaves.size() > ExchangeArguments::kMostArrays) {
    return made;
  }
  for (int leaf = 0; leaf < static_cast<int>(plan.leaves.size()); ++leaf) {
    const auto array = ExchangedOf(site, plan, leaf);
    if (!array.has_value()) return {};
    made.exchanged.push_back(*array);
  }
  Divide(OneShotMemory::Staged(plan.size), &made);
  return made;
}

}  // namespace jaxcomm
