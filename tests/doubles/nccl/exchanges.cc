// Collectives: every rank posts where its buffer is; when all have, each computes its
// own result from its peers' buffers, and writes it when all have finished reading, so
// that any overlap of send and receive buffers is harmless.
//
// Sends and receives: the sender of a pair posts where its buffer is, the receiver
// reads it there. One at a time, in the order of the calls.
#include <cstring>

#include "tests/doubles/nccl/operation.h"
#include "tests/doubles/nccl/room.h"

namespace jaxcomm::fake {
namespace {

void Compare(const char* what, int64_t a, int64_t b, std::string* out) {
  if (a == b) return;
  *out += out->empty() ? "" : ", ";
  *out += std::string(what) + " " + std::to_string(a) + " against " + std::to_string(b);
}

// How two ranks' operations differ; empty if they do not.
std::string Difference(const Posted& a, const Posted& b) {
  if (a.kind != b.kind) return std::string(Name(a.kind)) + " against " + Name(b.kind);
  std::string out;
  Compare("count", static_cast<int64_t>(a.count), static_cast<int64_t>(b.count), &out);
  Compare("type", a.type, b.type, &out);
  Compare("op", a.op, b.op, &out);
  Compare("root", a.root, b.root, &out);
  return out.empty() ? out : std::string(Name(a.kind)) + ": " + out;
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
    meeting_.Post({operation_.kind,
                   static_cast<int>(operation_.type),
                   IsReduction(operation_.kind) ? static_cast<int>(operation_.op) : 0,
                   HasRoot(operation_.kind) ? operation_.peer : kNobody,
                   operation_.count,
                   reinterpret_cast<uintptr_t>(operation_.send),
                   {}});
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

class Send final : public Exchange {
 public:
  Send(Room* room, int rank, const Operation& operation)
      : room_(room),
        peer_(operation.peer),
        operation_(operation),
        pair_(room->board().pairs[rank][operation.peer]) {}

  bool Advance(Room::Lock*) override {
    if (!posted_) {
      if (pair_.state != Pair::kEmpty) return false;
      pair_.posted = {0,
                      static_cast<int>(operation_.type),
                      0,
                      0,
                      operation_.count,
                      reinterpret_cast<uintptr_t>(operation_.send),
                      {}};
      pair_.state = Pair::kSent;
      posted_ = true;
    } else {
      if (pair_.state != Pair::kTaken) return false;
      pair_.state = Pair::kEmpty;
      done_ = true;
    }
    room_->Ring();
    return true;
  }

  void Withdraw(Room::Lock* lock) override {
    if (!posted_) return;
    while (pair_.reading != 0 && room_->IsAlive(peer_)) room_->Wait(lock);
    pair_.state = Pair::kEmpty;
  }

 private:
  Room* const room_;
  const int peer_;
  const Operation operation_;
  Pair& pair_;
  bool posted_ = false;
};

class Recv final : public Exchange {
 public:
  Recv(Room* room, int rank, const Operation& operation)
      : room_(room),
        rank_(rank),
        operation_(operation),
        pair_(room->board().pairs[operation.peer][rank]) {}

  bool Advance(Room::Lock* lock) override {
    if (pair_.state != Pair::kSent || !Agrees()) return false;
    pair_.reading = 1;
    lock->Release();
    const bool read =
        room_->Read(operation_.peer, pair_.posted.address, operation_.recv,
                    operation_.count * TypeBytes(operation_.type));
    lock->Acquire();
    pair_.reading = 0;
    if (read) pair_.state = Pair::kTaken;
    done_ = read;
    room_->Ring();
    return true;
  }

  void Withdraw(Room::Lock*) override {}

 private:
  bool Agrees() {
    const Posted& sent = pair_.posted;
    const int type = static_cast<int>(operation_.type);
    if (sent.count == operation_.count && sent.type == type) return true;
    room_->Fail(nccl::kInvalidUsage,
                "Rank " + std::to_string(operation_.peer) + " sends count " +
                    std::to_string(sent.count) + " type " + std::to_string(sent.type) +
                    " and rank " + std::to_string(rank_) + " receives count " +
                    std::to_string(operation_.count) + " type " + std::to_string(type));
    return false;
  }

  Room* const room_;
  const int rank_;
  const Operation operation_;
  Pair& pair_;
};

}  // namespace

std::unique_ptr<Exchange> MakeExchange(Room* room, int rank, uint64_t number,
                                       const Operation& operation) {
  if (operation.kind == kSend) return std::make_unique<Send>(room, rank, operation);
  if (operation.kind == kRecv) return std::make_unique<Recv>(room, rank, operation);
  return std::make_unique<Collective>(room, rank, number, operation);
}

}  // namespace jaxcomm::fake
