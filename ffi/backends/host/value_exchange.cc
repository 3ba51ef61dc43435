#include "ffi/backends/host/value_exchange.h"

#include <cstddef>
#include <cstdint>
#include <utility>

namespace jaxcomm {

ValueExchange::ValueExchange(const LocalRound& round, const GroupMembers& members,
                             int self)
    : site_(*round.call_site), from_{round.operands.data(), nullptr} {
  const auto size = static_cast<size_t>(members.size());
  const size_t leaves = site_.operands().size();
  std::vector<int> targets;  // a rank of each process
  uint64_t seen = 0;
  for (int rank = 0; rank < members.size(); ++rank) {
    const uint64_t process = uint64_t{1} << members.process_of[rank];
    if ((seen & process) == 0) targets.push_back(rank);
    seen |= process;
  }
  gathered_.resize(leaves);
  results_.assign(leaves, nullptr);
  operands_.assign(size * leaves, nullptr);
  for (size_t leaf = site_.plan_reads_operands_from(); leaf < leaves; ++leaf) {
    const auto bytes = static_cast<size_t>(site_.operands()[leaf].bytes());
    gathered_[leaf].resize(size * bytes);
    results_[leaf] = gathered_[leaf].data();
    for (size_t rank = 0; rank < size; ++rank) {
      operands_[rank * leaves + leaf] = gathered_[leaf].data() + rank * bytes;
      Move move;
      move.leaf = static_cast<int>(leaf);
      move.sources = Ranks::One(static_cast<int>(rank));
      move.targets = Ranks::Of(targets);
      move.inner = site_.operands()[leaf].elements;
      move.to.offset = static_cast<int64_t>(rank) * move.inner;
      plan_.moves.push_back(std::move(move));
    }
  }
  results_of_.assign(size, results_.data());
  for (size_t rank = 0; rank < size; ++rank) {
    operands_of_.push_back(operands_.data() + rank * leaves);
  }
  stream_ = MakeStreamPlan(plan_, site_.operands(), members.process_of, self);
}

Transfer::Work ValueExchange::work() const {
  Transfer::Work work;
  work.plan = &plan_;
  work.stream = &stream_;
  work.leaves = &site_.operands();
  work.buffers = {from_.operands, results_of_.data()};
  return work;
}

}  // namespace jaxcomm
