// Collectives: every rank posts where its buffer is; when all have, each computes its
// own result from its peers' buffers, and writes it when all have finished reading, so
// that any overlap of send and receive buffers is harmless.
#include <cstring>
#include <string>
#include <vector>

#include "tests/doubles/nccl/exchange.h"
#include "tests/doubles/nccl/meeting.h"
#include "tests/doubles/nccl/reduce.h"

namespace jaxcomm::fake {
namespace {

void Compare(const char* what, int64_t a, int64_t b, std::string* out) {
  if (a == b) return;
  *out += out->empty() ? "" : ", ";
  *out += std::string(what) + " " + std::to_string(a) + " against " + std::to_string(b);
}

// How two ranks' operations differ; empty if they do not.
std::string Difference(const Posted& a, const Posted& b) {
  if (a.kind != b.kind) return Name(a.kind) + " against " + Name(b.kind);
  std::string out;
  Compare("count", static_cast<int64_t>(a.count), static_cast<int64_t>(b.count), &out);
  Compare("type", a.type, b.type, &out);
  Compare("op", a.op, b.op, &out);
  Compare("root", a.root, b.root, &out);
  return out.empty() ? out : Name(a.kind) + ": " + out;
}

class Collective final : public Exchange {
 public:
  Collective(Room* room, int rank, uint64_t number, const Operation& operation)
      : room_(room),
        rank_(rank),
        operation_(operation),
        bytes_(operation.count * TypeBytes(operation.type)),
        meeting_(room, rank, kStreamLane, number) {}

  bool Advance(Room::Lock* lock) override {
    switch (phase_) {
      case kNew:
        if (!meeting_.MayPost()) return false;
        Post();
        phase_ = kPosted;
        return true;
      case kPosted:
        if (!meeting_.AllArrived() || !AllAgree()) return false;
        meeting_.BeginReading();
        lock->Release();
        ComputeResult();
        lock->Acquire();
        meeting_.EndReading();
        phase_ = kRead;
        return true;
      case kRead:
        if (!meeting_.AllFinished()) return false;
        if (!result_.empty()) {
          std::memcpy(operation_.recv, result_.data(), result_.size());
        }
        done_ = true;
        return true;
    }
    return false;
  }

  void Withdraw(Room::Lock* lock) override { meeting_.Withdraw(lock); }

 private:
  enum Phase { kNew, kPosted, kRead };

  void Post() {
    Posted posted{};
    posted.kind = operation_.kind;
    posted.type = static_cast<int>(operation_.type);
    posted.op = IsReduction(operation_.kind) ? static_cast<int>(operation_.op) : 0;
    posted.root = HasRoot(operation_.kind) ? operation_.peer : kNobody;
    posted.count = operation_.count;
    posted.address = reinterpret_cast<uintptr_t>(operation_.send);
    meeting_.Post(posted);
  }

  bool AllAgree() {
    for (int rank = 1; rank < room_->board().size; ++rank) {
      const std::string difference = Difference(meeting_.of(0), meeting_.of(rank));
      if (difference.empty()) continue;
      room_->Fail(nccl::kInvalidUsage, "Rank 0 and rank " + std::to_string(rank) +
                                           " disagree about " + difference);
      return false;
    }
    return true;
  }

  // Appends `bytes_` bytes of a rank's buffer, from its `block`-th block.
  void Append(int rank, int block) {
    const size_t end = result_.size();
    result_.resize(end + bytes_);
    const uint64_t offset = static_cast<uint64_t>(block) * bytes_;
    (void)room_->Read(rank, meeting_.of(rank).address + offset, result_.data() + end,
                      bytes_);
  }

  void Sum(int block) {
    Append(0, block);
    const auto premultiply = [this](char* data) {
      if (operation_.op != nccl::RedOp::kAvg) return;
      Premultiply(operation_.type, size(), data, operation_.count);
    };
    premultiply(result_.data() + result_.size() - bytes_);
    std::vector<char> term(bytes_);
    for (int rank = 1; rank < size(); ++rank) {
      const uint64_t offset = static_cast<uint64_t>(block) * bytes_;
      (void)room_->Read(rank, meeting_.of(rank).address + offset, term.data(), bytes_);
      premultiply(term.data());
      Accumulate(operation_.type, operation_.op, term.data(), result_.data(),
                 operation_.count);
    }
  }

  // What others posted stays as it is until EndReading().
  void ComputeResult() {
    const bool is_root = rank_ == operation_.peer;
    switch (operation_.kind) {
      case kAllReduce:
        return Sum(0);
      case kReduce:
        if (is_root) Sum(0);
        return;
      case kReduceScatter:
        return Sum(rank_);
      case kBroadcast:
        return Append(operation_.peer, 0);
      case kScatter:
        return Append(operation_.peer, rank_);
      case kAllGather:
      case kGather:
        if (operation_.kind == kGather && !is_root) return;
        for (int rank = 0; rank < size(); ++rank) Append(rank, 0);
        return;
      case kAlltoAll:
        for (int rank = 0; rank < size(); ++rank) Append(rank, rank_);
        return;
      default:
        return;
    }
  }

  int size() const { return room_->board().size; }

  Room* const room_;
  const int rank_;
  const Operation operation_;
  const size_t bytes_;
  Meeting meeting_;
  Phase phase_ = kNew;
  std::vector<char> result_;
};

}  // namespace

std::unique_ptr<Exchange> MakeCollective(Room* room, int rank, uint64_t number,
                                         const Operation& operation) {
  return std::make_unique<Collective>(room, rank, number, operation);
}

}  // namespace jaxcomm::fake
