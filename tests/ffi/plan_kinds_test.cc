// For every collective, with random parameters: its moves do what the collective is
// defined to do.
#include <algorithm>
#include <random>

#include "ffi/core/plan.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

using Numbers = std::vector<int32_t>;
// [leaf][rank]
using Buffers = std::vector<std::vector<Numbers>>;

constexpr int kMostRanks = 9;
constexpr int32_t kUnwritten = -12345;

struct Problem {
  std::string collective;
  int size = 1;
  std::vector<int64_t> params;
  std::vector<Leaf> operand_leaves, result_leaves;
  Buffers operands, expected;
  std::unique_ptr<CallSite> site;
};

Leaf Integers(std::vector<int64_t> dims) {
  int64_t elements = 1;
  for (int64_t dim : dims) elements *= dim;
  return {DataType::S32, std::move(dims), elements, sizeof(int32_t)};
}

class Maker {
 public:
  Maker(const std::string& collective, int size, uint32_t seed) : random_(seed) {
    made_.collective = collective;
    made_.size = size;
  }

  Problem Make() {
    const std::string& name = made_.collective;
    if (name == "ragged_all_to_all") {
      Ragged();
    } else {
      const int leaves = static_cast<int>(Upto(3)) + 1;
      const int root = static_cast<int>(Upto(made_.size - 1));
      const bool exclusive = Upto(1) == 1, reverse = Upto(1) == 1;
      if (name == "broadcast" || name == "reduce" || name == "gather" ||
          name == "scatter") {
        made_.params = {root};
      }
      if (name == "scan") made_.params = {exclusive, reverse};
      if (name == "permute") {
        for (int rank = 0; rank < made_.size; ++rank) {
          made_.params.push_back(Upto(made_.size) - 1);
        }
      }
      for (int leaf = 0; leaf < leaves; ++leaf) AddLeaf(root, exclusive, reverse);
    }
    made_.site =
        MakeSite(name, made_.params, made_.operand_leaves, made_.result_leaves);
    return std::move(made_);
  }

 private:
  int64_t Upto(int64_t most) {
    return static_cast<int64_t>(random_() % static_cast<uint32_t>(most + 1));
  }

  Numbers Values(int64_t count) {
    Numbers values;
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(static_cast<int32_t>(Upto(1 << 16)));
    }
    return values;
  }

  // Every definition says where element `at` of the result of `rank` comes from.
  template <typename Definition>
  void Add(std::vector<int64_t> operand, std::vector<int64_t> result,
           const Definition& definition) {
    const Leaf from = Integers(std::move(operand)), to = Integers(std::move(result));
    std::vector<Numbers> values, expected;
    for (int rank = 0; rank < made_.size; ++rank)
      values.push_back(Values(from.elements));
    for (int rank = 0; rank < made_.size; ++rank) {
      Numbers out;
      for (int64_t at = 0; at < to.elements; ++at) {
        out.push_back(definition(values, rank, at));
      }
      expected.push_back(std::move(out));
    }
    made_.operand_leaves.push_back(from);
    made_.result_leaves.push_back(to);
    made_.operands.push_back(std::move(values));
    made_.expected.push_back(std::move(expected));
  }

  static int32_t SumAt(const std::vector<Numbers>& values, int64_t at) {
    int32_t sum = 0;
    for (const Numbers& of_rank : values) sum += of_rank[at];
    return sum;
  }

  void AddLeaf(int root, bool exclusive, bool reverse) {
    const std::string& name = made_.collective;
    const int64_t n = made_.size;
    // Often 1, as NCCL needs it; and sometimes nothing.
    const int64_t outer = Upto(1) == 0 ? 1 : Upto(3);
    const int64_t middle = Upto(1) == 0 ? 1 : Upto(3);
    const int64_t inner = Upto(4);
    if (name == "all_reduce") {
      Add({inner}, {inner},
          [](const auto& x, int, int64_t at) { return SumAt(x, at); });
    } else if (name == "reduce") {
      Add({inner}, {inner}, [root](const auto& x, int rank, int64_t at) {
        return rank == root ? SumAt(x, at) : 0;
      });
    } else if (name == "broadcast") {
      Add({inner}, {inner},
          [root](const auto& x, int, int64_t at) { return x[root][at]; });
    } else if (name == "permute") {
      Add({inner}, {inner}, [this](const auto& x, int rank, int64_t at) {
        const int64_t source = made_.params[rank];
        return source < 0 ? 0 : x[source][at];
      });
    } else if (name == "scan") {
      Add({inner}, {inner}, [=](const auto& x, int rank, int64_t at) {
        int32_t sum = 0;
        for (int other = 0; other < n; ++other) {
          const bool before = reverse ? other > rank : other < rank;
          if (before || (other == rank && !exclusive)) sum += x[other][at];
        }
        return sum;
      });
    } else if (name == "all_gather" || name == "gather") {
      made_.params.push_back(outer);
      const bool to_all = name == "all_gather";
      // [outer, inner] -> [outer, rank, inner]
      Add({outer, inner}, {outer, n, inner}, [=](const auto& x, int rank, int64_t at) {
        const int64_t o = at / (n * inner), of = at / inner % n, i = at % inner;
        return to_all || rank == root ? x[of][o * inner + i] : 0;
      });
    } else if (name == "reduce_scatter" || name == "scatter") {
      made_.params.push_back(outer);
      const bool reduces = name == "reduce_scatter";
      // [outer, rank, inner] -> [outer, inner]
      Add({outer, n, inner}, {outer, inner}, [=](const auto& x, int rank, int64_t at) {
        const int64_t place = (at / inner * n + rank) * inner + at % inner;
        return reduces ? SumAt(x, place) : x[root][place];
      });
    } else if (name == "all_to_all") {
      const bool split_first = Upto(1) == 1;
      made_.params.insert(made_.params.end(), {outer, middle, split_first});
      const std::vector<int64_t> first = {outer, n, middle, inner};
      const std::vector<int64_t> last = {outer, middle, n, inner};
      Add(split_first ? first : last, split_first ? last : first,
          [=](const auto& x, int rank, int64_t at) {
            const int64_t i = at % inner, o = at / (inner * n * middle);
            const int64_t b = at / inner % (n * middle);
            const int64_t source = split_first ? b % n : b / middle;
            const int64_t m = split_first ? b / n : b % middle;
            const int64_t place =
                split_first ? (o * n + rank) * middle + m : (o * middle + m) * n + rank;
            return x[source][place * inner + i];
          });
    } else if (name != "barrier" && name != "check_positions") {
      CHECK_EQ(name, "a collective that this test knows");
    }
  }

  // Slices of random lengths, which lie one behind the other on both sides.
  void Ragged() {
    const int n = made_.size;
    const int64_t k = 1 + Upto(2), row = 1 + Upto(2), slices = n * k;
    std::vector<Numbers> sends(n), from(n), to(n), receives(n);
    for (int rank = 0; rank < n; ++rank) {
      for (int64_t i = 0; i < slices; ++i) {
        sends[rank].push_back(static_cast<int32_t>(Upto(2)));
      }
      receives[rank].assign(slices, 0);
      to[rank].assign(slices, 0);
    }
    int64_t data_rows = 1, output_rows = 1;
    for (int rank = 0; rank < n; ++rank) {
      int32_t sent = 0, received = 1;  // row 0 keeps what it has
      for (int64_t i = 0; i < slices; ++i) {
        from[rank].push_back(sent);
        sent += sends[rank][i];
        const int64_t source = i / k, slice = rank * k + i % k;
        receives[rank][i] = sends[source][slice];
        to[source][slice] = received;
        received += sends[source][slice];
      }
      data_rows = std::max<int64_t>(data_rows, sent);
      output_rows = std::max<int64_t>(output_rows, received);
    }
    const Leaf index = Integers({slices});
    made_.operand_leaves = {Integers({data_rows, row}),
                            Integers({output_rows, row}),
                            index,
                            index,
                            index,
                            index};
    made_.result_leaves = {made_.operand_leaves[1]};
    std::vector<Numbers> data, output;
    for (int rank = 0; rank < n; ++rank) {
      data.push_back(Values(data_rows * row));
      output.push_back(Numbers(output_rows * row, kUnwritten));
    }
    std::vector<Numbers> expected = output;
    for (int rank = 0; rank < n; ++rank) {
      for (int64_t i = 0; i < slices; ++i) {
        for (int64_t at = 0; at < sends[rank][i] * row; ++at) {
          expected[i / k][to[rank][i] * row + at] =
              data[rank][from[rank][i] * row + at];
        }
      }
    }
    made_.operands = {data, output, from, sends, to, receives};
    made_.expected = {expected};
  }

  std::mt19937 random_;
  Problem made_;
};

// Moves as they are documented.
void RunMove(const Problem& problem, const Move& move, Buffers* results) {
  for (int64_t row = 0; row < move.rows(); ++row) {
    for (int64_t i = 0; i < move.inner; ++i) {
      const int64_t from = move.RowAt(move.from, row) + i;
      const int64_t to = move.RowAt(move.to, row) + i;
      for (size_t target = 0; target < move.targets.size(); ++target) {
        int32_t value = 0;
        const size_t used = move.running ? target + 1 : move.sources.size();
        for (size_t source = 0; source < used; ++source) {
          value += problem.operands[move.leaf][move.sources[source]].at(from);
        }
        (*results)[move.leaf][move.targets[target]].at(to) = value;
      }
    }
  }
}

Buffers Unwritten(const Problem& problem) {
  Buffers results = problem.expected;
  for (auto& leaf : results) {
    for (Numbers& of_rank : leaf) of_rank.assign(of_rank.size(), kUnwritten);
  }
  return results;
}

std::string Text(const Move& move) {
  std::string text = StrCat("leaf ", move.leaf, " of");
  for (int rank : move.sources) text += StrCat(" ", rank);
  text += " to";
  for (int rank : move.targets) text += StrCat(" ", rank);
  return text + StrCat(": ", move.rows(), " x ", move.inner, " from ", move.from.offset,
                       " to ", move.to.offset, "\n");
}

ErrorOr<Plan> PlanOf(const Problem& problem) {
  std::vector<std::vector<const void*>> pointers(problem.size);
  std::vector<const void* const*> operands_of;
  for (int rank = 0; rank < problem.size; ++rank) {
    for (const auto& operand : problem.operands) {
      pointers[rank].push_back(operand[rank].data());
    }
    operands_of.push_back(pointers[rank].data());
  }
  const bool reads = problem.site->plan_reads_operands();
  return problem.site->MakePlan(problem.size, reads ? operands_of.data() : nullptr);
}

void CheckMoves(const Problem& problem, const Plan& plan) {
  Buffers results = Unwritten(problem);
  for (int leaf = 0; leaf < static_cast<int>(plan.leaves.size()); ++leaf) {
    // A rank is given its own moves, in the order of all.
    std::vector<std::string> of(problem.size), found(problem.size);
    plan.ForEachMove(leaf, Plan::kEveryRank, [&](const Move& move) {
      CHECK_EQ(move.leaf, leaf);
      CHECK_TRUE(!plan.pairwise ||
                 (move.sources.size() <= 1 && move.targets.size() == 1));
      RunMove(problem, move, &results);
      for (int rank = 0; rank < problem.size; ++rank) {
        bool takes_part = false;
        for (int source : move.sources) takes_part |= source == rank;
        for (int target : move.targets) takes_part |= target == rank;
        if (takes_part) of[rank] += Text(move);
      }
    });
    for (int rank = 0; rank < problem.size; ++rank) {
      plan.ForEachMove(leaf, rank,
                       [&](const Move& move) { found[rank] += Text(move); });
      CHECK_EQ(found[rank], of[rank]);
    }
  }
  CHECK_TRUE(results == problem.expected);
}

TEST(moves_do_what_collectives_are_defined_to_do) {
  constexpr uint32_t kTrials = 8;
  for (const Collective* collective : kCollectives) {
    for (int size = 1; size <= kMostRanks; ++size) {
      for (uint32_t trial = 0; trial < kTrials; ++trial) {
        const int before = Failures();
        const uint32_t seed = trial * 100 + static_cast<uint32_t>(size);
        const Problem problem =
            Maker(std::string(collective->name()), size, seed).Make();
        CheckMoves(problem, Must(PlanOf(problem)));
        if (Failures() == before) continue;
        std::fprintf(stderr, "  in %s over %d ranks, trial %u\n",
                     problem.site->description().c_str(), size, trial);
        return;
      }
    }
  }
}

}  // namespace
}  // namespace jaxcomm::testing
