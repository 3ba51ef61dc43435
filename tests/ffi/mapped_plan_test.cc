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

// A plan of random copies: some of the same bytes, some larger than a slot.
PeerPlan RandomPlan(int size, std::mt19937& random) {
  PeerPlan plan;
  plan.parts.resize(static_cast<size_t>(size));
  std::vector<int64_t> filled(static_cast<size_t>(size), 0);
  const auto below = [&](int most) { return static_cast<int>(random() % most); };
  for (int rank = 0; rank < size; ++rank) {
    for (int i = below(6); i > 0; --i) {
      const auto bytes = static_cast<size_t>(1 + below(3 * kSlot));
      const int64_t from = below(1000);
      for (int targets = 1 + below(size); targets > 0; --targets) {
        const int target = below(size);
        if (target == rank) continue;
        plan.parts[rank].copies.push_back({target, 0, from, filled[target], bytes});
        filled[target] += static_cast<int64_t>(bytes);
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
      for (const PeerPlan::Copy& copy : plan.parts[rank].copies) {
        std::memcpy(expected[copy.target].data() + copy.to,
                    operands[rank].data() + copy.from, copy.bytes);
      }
    }
    for (size_t chunk = 0; chunk < ranks[0].chunks.size(); ++chunk) {
      // What was staged for the chunk before is gone.
      std::vector<std::vector<char>> slots(static_cast<size_t>(size),
                                           std::vector<char>(kSlot));
      std::set<std::pair<int, int>> told, waited;
      for (int rank = 0; rank < size; ++rank) {
        const MappedPlan::Chunk& own = ranks[rank].chunks[chunk];
        size_t end = 0;
        for (const MappedPlan::Stage& stage : own.stages) {
          CHECK_TRUE(stage.at >= end && stage.at + stage.bytes <= kSlot);
          end = stage.at + stage.bytes;
          std::memcpy(slots[rank].data() + stage.at, operands[rank].data() + stage.from,
                      stage.bytes);
        }
        for (int target : own.targets) told.insert({rank, target});
      }
      for (int rank = 0; rank < size; ++rank) {
        const MappedPlan::Chunk& own = ranks[rank].chunks[chunk];
        std::set<int> sources;
        for (const MappedPlan::Pull& pull : own.pulls) {
          sources.insert(pull.source);
          std::memcpy(results[rank].data() + pull.to,
                      slots[pull.source].data() + pull.at, pull.bytes);
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
  plan.parts[0].copies = {{1, 0, 0, 0, 100}, {2, 0, 0, 50, 100}, {2, 0, 100, 0, 50}};
  const MappedPlan made = MakeMappedPlan(plan, 0, kSlot);
  CHECK_EQ(made.chunks.size(), size_t{1});
  CHECK_EQ(made.chunks[0].stages.size(), size_t{2});
  CHECK_EQ(made.chunks[0].targets.size(), size_t{2});
}

}  // namespace
}  // namespace jaxcomm::testing
