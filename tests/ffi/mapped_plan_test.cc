// Collectives as copies through staged memory: carried out here by all ranks in turn,
// and compared with the moves of the plan.
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "ffi/backends/nccl/plans/mapped_plan.h"
#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

constexpr size_t kSlot = 4096;

// Moves rows from one memory to another.
void Move(const Step& step, char* to, const char* from) {
  for (int64_t row = 0; row < step.rows; ++row) {
    std::memcpy(to + step.to + row * step.to_pitch,
                from + step.from + row * step.from_pitch, step.count);
  }
}

Step CopyTo(int target, int64_t from, int64_t to, size_t bytes) {
  Step copy;
  copy.kind = Step::Kind::kSend;
  copy.peer = target;
  copy.from = from;
  copy.to = to;
  copy.count = bytes;
  return copy;
}

// A plan of random copies: some of the same bytes, some of rows, and some larger than a
// slot.
PeerPlan RandomPlan(int size, std::mt19937& random) {
  PeerPlan plan;
  plan.parts.resize(static_cast<size_t>(size));
  std::vector<int64_t> filled(static_cast<size_t>(size), 0);
  const auto below = [&](int most) { return static_cast<int>(random() % most); };
  for (int rank = 0; rank < size; ++rank) {
    for (int i = below(6); i > 0; --i) {
      const int rows = below(2) == 0 ? 1 : 2 + below(40);
      const int64_t bytes = 1 + below(3 * static_cast<int>(kSlot) / rows);
      const int64_t from = below(1000), from_pitch = bytes + below(2) * below(100);
      for (int targets = 1 + below(size); targets > 0; --targets) {
        const int target = below(size);
        if (target == rank) continue;
        Step copy = CopyTo(target, from, filled[target], static_cast<size_t>(bytes));
        copy.rows = rows;
        copy.from_pitch = from_pitch;
        copy.to_pitch = bytes + below(2) * below(100);
        plan.parts[rank].copies.push_back(copy);
        filled[target] += rows * copy.to_pitch;
      }
    }
  }
  return plan;
}

TEST(every_byte_arrives_through_slots_that_hold_one_chunk_at_a_time) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; ++trial) {
    const int size = 2 + trial % 4;
    const PeerPlan plan = RandomPlan(size, random);
    std::vector<MappedPlan> ranks;
    std::vector<std::vector<char>> operands, results, expected;
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(MakeMappedPlan(plan, rank, kSlot));
      CHECK_EQ(ranks[rank].chunks.size(), ranks[0].chunks.size());
      operands.emplace_back(16 * kSlot);
      for (char& each : operands.back()) each = static_cast<char>(random());
      results.emplace_back(size_t{1} << 20);
      expected.emplace_back(size_t{1} << 20);
    }
    for (int rank = 0; rank < size; ++rank) {
      for (const Step& copy : plan.parts[rank].copies) {
        Move(copy, expected[copy.peer].data(), operands[rank].data());
      }
    }
    for (size_t chunk = 0; chunk < ranks[0].chunks.size(); ++chunk) {
      // What was staged for the chunk before is gone.
      std::vector<std::vector<char>> slots(static_cast<size_t>(size),
                                           std::vector<char>(kSlot));
      std::set<std::pair<int, int>> told, waited;
      for (int rank = 0; rank < size; ++rank) {
        const MappedPlan::Chunk& own = ranks[rank].chunks[chunk];
        int64_t end = 0;
        for (const Step& stage : own.stages) {
          CHECK_TRUE(stage.to >= end);
          end = stage.to + stage.bytes();
          CHECK_TRUE(end <= static_cast<int64_t>(kSlot));
          Move(stage, slots[rank].data(), operands[rank].data());
        }
        for (int target : own.targets) told.insert({rank, target});
      }
      for (int rank = 0; rank < size; ++rank) {
        const MappedPlan::Chunk& own = ranks[rank].chunks[chunk];
        std::set<int> sources;
        for (const Step& pull : own.pulls) {
          sources.insert(pull.peer);
          Move(pull, results[rank].data(), slots[pull.peer].data());
        }
        CHECK_EQ(sources.size(), own.sources.size());
        for (int source : own.sources) waited.insert({source, rank});
      }
      // Who waits is told, and who is told waits, once: else a word would be stale.
      CHECK_TRUE(told == waited);
    }
    CHECK_TRUE(results == expected);
  }
}

TEST(what_several_ranks_take_is_staged_once) {
  PeerPlan plan;
  plan.parts.resize(3);
  plan.parts[0].copies = {CopyTo(1, 0, 0, 100), CopyTo(2, 0, 50, 100),
                          CopyTo(2, 100, 0, 50)};
  const MappedPlan made = MakeMappedPlan(plan, 0, kSlot);
  CHECK_EQ(made.chunks.size(), size_t{1});
  CHECK_EQ(made.chunks[0].stages.size(), size_t{2});
  CHECK_EQ(made.chunks[0].targets.size(), size_t{2});
}

}  // namespace
}  // namespace jaxcomm::testing
