#include "ffi/backends/host/arena/stream_plan.h"

#include <algorithm>

#include "ffi/backends/host/arena/arena_memory.h"
#include "ffi/os/cores.h"

namespace jaxcomm {
namespace {

// From this size on all-reduces between more than two processes go in two phases.
constexpr int64_t kTwoPhaseBytes = 32 << 10;
// Chunks in flight where every process has a core: they stay in its cache.
constexpr int kStreamWindow = 4;

uint64_t Bit(int process) { return uint64_t{1} << process; }

class StreamPlanner {
 public:
  StreamPlanner(const HostPlan& plan, const std::vector<Leaf>& leaves,
                const std::vector<int>& process_of, int self)
      : plan_(plan), leaves_(leaves), process_of_(process_of), self_(self) {
    for (int process : process_of_) everyone_ |= Bit(process);
    for (int process = 0; process < kMaxProcesses; ++process) {
      if (everyone_ & Bit(process)) members_.push_back(process);
    }
  }

  // With `chunk_bytes` = 0 nothing is cut: for operands that go inline.
  StreamPlan Make(int64_t chunk_bytes) {
    out_ = StreamPlan();
    chunks_.assign(kMaxProcesses, 0);
    bytes_.assign(kMaxProcesses, 0);
    chunk_bytes_ = chunk_bytes;
    for (int index = 0; index < static_cast<int>(plan_.moves.size()); ++index) {
      AddMove(index);
    }
    return std::move(out_);
  }

  int num_processes() const { return static_cast<int>(members_.size()); }
  int64_t most_bytes() const { return *std::max_element(bytes_.begin(), bytes_.end()); }

 private:
  std::vector<int> OnlyOf(const Ranks& ranks, int process) const {
    std::vector<int> found;
    for (int rank : ranks) {
      if (process_of_[rank] == process) found.push_back(rank);
    }
    return found;
  }

  // Whether each process has a subtree of the tree that combines the sources, all of
  // one height. Their partial results then make the same tree.
  bool HoldSubtrees(const Ranks& sources) const {
    const size_t width = OnlyOf(sources, process_of_[sources[0]]).size();
    if ((width & (width - 1)) != 0) return false;
    uint64_t seen = 0;
    for (size_t i = 0; i < sources.size(); ++i) {
      const uint64_t process = Bit(process_of_[sources[i]]);
      const bool is_new = (seen & process) == 0;
      if (is_new != (i % width == 0)) return false;
      seen |= process;
    }
    return true;
  }

  void AddMove(int index) {
    const Move& move = plan_.moves[index];
    const int64_t rows = move.rows();
    if (rows == 0 || move.inner == 0 || move.targets.empty()) return;
    uint64_t sources = 0, targets = 0;
    for (int rank : move.sources) sources |= Bit(process_of_[rank]);
    for (int rank : move.targets) targets |= Bit(process_of_[rank]);
    if (move.sources.empty()) {
      Read fill;
      fill.piece = {index, 0, rows, 0, move.inner};
      fill.targets = OnlyOf(move.targets, self_);
      if (!fill.targets.empty()) out_.reads.push_back(std::move(fill));
      return;
    }
    if (sources == targets && (sources & (sources - 1)) == 0) {
      if (sources == Bit(self_)) out_.local_moves.push_back(index);
      return;
    }
    const Leaf& leaf = leaves_[move.leaf];
    const bool reduces = move.running || move.sources.size() > 1;
    const bool combines = reduces && !move.running && AccumulatesInItself(leaf.dtype) &&
                          HoldSubtrees(move.sources);
    int64_t parts = 1;
    if (reduces && !combines) {
      for (int process : members_) {
        parts = std::max<int64_t>(parts, OnlyOf(move.sources, process).size());
      }
    }
    const int64_t bytes = rows * move.inner * static_cast<int64_t>(leaf.element_bytes);
    const bool two_phase = reduces && !move.running && members_.size() > 2 &&
                           chunk_bytes_ > 0 && bytes >= kTwoPhaseBytes &&
                           sources == everyone_ && targets == everyone_;
    int64_t piece_bytes = chunk_bytes_ / parts;
    if (two_phase) {
      // One round of pieces where that can be.
      const int64_t share = bytes / static_cast<int64_t>(members_.size()) + 64;
      piece_bytes = std::min(piece_bytes, (share + 63) / 64 * 64);
    }
    std::vector<Block> pieces;
    if (chunk_bytes_ == 0) {
      pieces.push_back({index, 0, rows, 0, move.inner});
    } else {
      CutMove(move, index, static_cast<int64_t>(leaf.element_bytes), piece_bytes,
              piece_bytes, &pieces);
    }
    if (!two_phase) {
      for (const Block& piece : pieces) AddPiece(piece, move, combines, targets);
      return;
    }
    const size_t owners = members_.size();
    for (size_t first = 0; first < pieces.size(); first += owners) {
      const size_t last = std::min(first + owners, pieces.size());
      int64_t mine = -1;
      for (size_t i = first; i < last; ++i) {
        const int owner = members_[i - first];
        AddPiece(pieces[i], move, combines, Bit(owner));
        if (owner == self_) mine = static_cast<int64_t>(out_.reads.size());
      }
      for (size_t i = first; i < last; ++i) {
        AddResult(pieces[i], move, members_[i - first], mine);
      }
    }
  }

  int64_t BytesOf(const Block& piece) const {
    const Leaf& leaf = leaves_[plan_.moves[piece.move].leaf];
    return piece.rows() * piece.width() * static_cast<int64_t>(leaf.element_bytes);
  }

  // Gives the next chunk of a process to a piece of so many parts.
  Chunk NextChunk(int process, const Block& piece, int64_t parts) {
    const Chunk chunk{process, chunks_[process]++, bytes_[process]};
    // Aligned for the reduction kernels.
    bytes_[process] += (parts * BytesOf(piece) + 63) / 64 * 64;
    return chunk;
  }

  // Takes a piece from all its sources to those of its targets in `targets`.
  void AddPiece(const Block& piece, const Move& move, bool combines, uint64_t targets) {
    const bool reduces = move.running || move.sources.size() > 1;
    Read read;
    read.piece = piece;
    read.running = move.running;
    std::vector<std::pair<int, Source>> by_rank;  // uncombined, in rank order
    for (int process : members_) {
      const std::vector<int> ranks = OnlyOf(move.sources, process);
      if (ranks.empty()) continue;
      const bool partial = combines && ranks.size() > 1;
      uint64_t readers = targets & ~Bit(process);
      // Every process combines the same partial results: the tree is the same for all.
      const bool reads_own = partial && (targets & Bit(process)) != 0;
      if (reads_own) readers |= Bit(process);
      Chunk chunk;
      if (readers != 0) {
        const auto parts = static_cast<int64_t>(partial ? 1 : ranks.size());
        chunk = NextChunk(process, piece, parts);
        if (process == self_) {
          Stage stage;
          stage.what = partial ? Stage::kReduce : Stage::kCopy;
          stage.piece = piece;
          stage.ranks = ranks;
          stage.readers = readers;
          stage.offset = chunk.offset;
          if (!reduces) stage.local_targets = OnlyOf(move.targets, self_);
          out_.stages.push_back(std::move(stage));
        }
      }
      for (size_t part = 0; part < ranks.size(); ++part) {
        Source source;
        if (process == self_ && !reads_own) {
          source.rank = ranks[part];
        } else {
          source.chunk = chunk;
          source.part = partial ? 0 : static_cast<int64_t>(part);
        }
        by_rank.emplace_back(partial ? ranks[0] : ranks[part], source);
        if (partial && (process != self_ || reads_own)) break;
      }
    }
    if ((targets & Bit(self_)) == 0) return;
    if (!reduces && process_of_[move.sources[0]] == self_)
      return;  // copied by the stage
    if (move.running) {
      // targets[i] takes sources[0 .. i], in the order of the move.
      for (int rank : move.sources) {
        for (const auto& [of, source] : by_rank) {
          if (of == rank) read.sources.push_back(source);
        }
      }
      for (size_t i = 0; i < move.targets.size(); ++i) {
        if (process_of_[move.targets[i]] != self_) continue;
        read.targets.push_back(move.targets[i]);
        read.prefix.push_back(static_cast<int>(i) + 1);
      }
    } else {
      std::stable_sort(by_rank.begin(), by_rank.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
      for (const auto& entry : by_rank) read.sources.push_back(entry.second);
      read.targets = OnlyOf(move.targets, self_);
    }
    out_.reads.push_back(std::move(read));
  }

  // Takes a reduced piece from its owner's result to everybody else's.
  void AddResult(const Block& piece, const Move& move, int owner, int64_t read_index) {
    const Chunk chunk = NextChunk(owner, piece, 1);
    if (owner == self_) {
      out_.reads[read_index - 1].staged = true;
      Stage stage;
      stage.what = Stage::kResult;
      stage.piece = piece;
      stage.ranks = {OnlyOf(move.targets, self_).front()};
      stage.readers = everyone_ & ~Bit(self_);
      stage.after = read_index;
      stage.offset = chunk.offset;
      out_.stages.push_back(std::move(stage));
      return;
    }
    Read read;
    read.piece = piece;
    Source source;
    source.chunk = chunk;
    read.sources.push_back(source);
    read.targets = OnlyOf(move.targets, self_);
    out_.reads.push_back(std::move(read));
  }

  const HostPlan& plan_;
  const std::vector<Leaf>& leaves_;
  const std::vector<int>& process_of_;
  const int self_;
  uint64_t everyone_ = 0;
  std::vector<int> members_;
  StreamPlan out_;
  std::vector<int64_t> chunks_;
  std::vector<int64_t> bytes_;
  int64_t chunk_bytes_ = 0;
};

}  // namespace

StreamPlan MakeStreamPlan(const HostPlan& plan, const std::vector<Leaf>& leaves,
                          const std::vector<int>& process_of, int self) {
  StreamPlanner planner(plan, leaves, process_of, self);
  StreamPlan whole = planner.Make(0);
  if (planner.most_bytes() <= kInlineBytes) {
    whole.is_inline = true;
    return whole;
  }
  StreamPlan cut = planner.Make(kSlotBytes);
  cut.window = planner.num_processes() > Cores() ? kSlots : kStreamWindow;
  return cut;
}

}  // namespace jaxcomm
