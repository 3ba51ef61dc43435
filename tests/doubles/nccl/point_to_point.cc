// Sends and receives: the sender of a pair posts where its buffer is, the receiver
// reads it there. One at a time, in the order of the calls.
#include <string>

#include "tests/doubles/nccl/exchange.h"
#include "tests/doubles/nccl/reduce.h"

namespace jaxcomm::fake {
namespace {

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
      pair_.posted = {};
      pair_.posted.count = operation_.count;
      pair_.posted.type = static_cast<int>(operation_.type);
      pair_.posted.address = reinterpret_cast<uintptr_t>(operation_.send);
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

std::unique_ptr<Exchange> MakeSend(Room* room, int rank, const Operation& operation) {
  return std::make_unique<Send>(room, rank, operation);
}

std::unique_ptr<Exchange> MakeRecv(Room* room, int rank, const Operation& operation) {
  return std::make_unique<Recv>(room, rank, operation);
}

}  // namespace jaxcomm::fake
