// How all ranks meet in a room.
#include "tests/doubles/nccl/failed.h"
#include "tests/doubles/nccl/operation.h"
#include "tests/doubles/nccl/room.h"

namespace jaxcomm::fake {

bool Meeting::MayPost() const { return AllFinished(number_ - 1); }

void Meeting::Post(const Posted& posted) {
  mine().posted = posted;
  mine().arrived = number_;
  posted_ = true;
  room_->Ring();
}

bool Meeting::AllArrived() const {
  for (int rank = 0; rank < room_->board().size; ++rank) {
    if (room_->board().slots[lane_][rank].arrived != number_) return false;
  }
  return true;
}

void Meeting::BeginReading() {
  for (int rank = 0; rank < room_->board().size; ++rank) {
    room_->board().slots[lane_][rank].readers |= uint64_t{1} << rank_;
  }
}

void Meeting::EndReading() {
  for (int rank = 0; rank < room_->board().size; ++rank) {
    room_->board().slots[lane_][rank].readers &= ~(uint64_t{1} << rank_);
  }
  mine().finished = number_;
  room_->Ring();
}

bool Meeting::AllFinished() const { return AllFinished(number_); }

bool Meeting::AllFinished(uint64_t number) const {
  for (int rank = 0; rank < room_->board().size; ++rank) {
    if (room_->board().slots[lane_][rank].finished < number) return false;
  }
  return true;
}

void Meeting::Withdraw(Room::Lock* lock) {
  if (!posted_) return;
  mine().arrived = 0;
  const auto is_read = [this] {
    for (int rank = 0; rank < room_->board().size; ++rank) {
      const bool reads = (mine().readers >> rank & 1) != 0;
      if (reads && rank != rank_ && room_->IsAlive(rank)) return true;
    }
    return false;
  };
  while (is_read()) room_->Wait(lock);
}

nccl::Result MeetOnHost(Room* room, int rank, uint64_t number, const Posted& posted,
                        const std::function<bool()>& stopped,
                        std::vector<Posted>* all) {
  Meeting meeting(room, rank, kHostLane, number);
  Room::Lock lock(*room);
  Board& board = room->board();
  const auto failure = [&board] {
    return Failure(static_cast<nccl::Result>(board.failure), board.failure_text);
  };
  const auto wait_for = [&](const std::function<bool()>& condition) {
    while (!condition()) {
      if (board.failure != nccl::kSuccess) return failure();
      if (stopped()) {
        return Failure(nccl::kInternalError, "The communicator was aborted");
      }
      room->Wait(&lock, /*notices_death=*/true);
    }
    return nccl::kSuccess;
  };
  nccl::Result result = wait_for([&] { return meeting.MayPost(); });
  if (result != nccl::kSuccess) return result;
  meeting.Post(posted);
  result = wait_for([&] { return meeting.AllArrived(); });
  if (result != nccl::kSuccess) {
    meeting.Withdraw(&lock);
    return result;
  }
  all->clear();
  for (int peer = 0; peer < board.size; ++peer) {
    all->push_back(meeting.of(peer));
    if (all->back().kind == all->front().kind) continue;
    room->Fail(nccl::kInvalidUsage,
               std::string("Rank 0 called ") + Name(all->front().kind) + " and rank " +
                   std::to_string(peer) + " " + Name(all->back().kind));
    return failure();
  }
  meeting.EndReading();
  return wait_for([&] { return meeting.AllFinished(); });
}

}  // namespace jaxcomm::fake
