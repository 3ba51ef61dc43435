// All ranks of a communicator meet to show each other a Posted: a collective of a
// stream, or a call that all ranks make. Nobody leaves before all have read.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_MEETING_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_MEETING_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/doubles/nccl/room.h"

namespace jaxcomm::fake {

// All functions are for holders of the room's lock.
class Meeting {
 public:
  // The `number`-th of this lane, from 1; the same on all ranks.
  Meeting(Room* room, int rank, Lane lane, uint64_t number)
      : room_(room), rank_(rank), lane_(lane), number_(number) {}

  // False while the previous meeting lasts.
  bool MayPost() const;
  void Post(const Posted& posted);
  bool AllArrived() const;
  const Posted& of(int rank) const { return room_->board().slots[lane_][rank].posted; }

  // Between the two, buffers of all ranks may be read, also without the lock.
  void BeginReading();
  void EndReading();
  bool AllFinished() const;

  // Gives up, and returns when nobody reads this rank's buffer any more.
  void Withdraw(Room::Lock* lock);

 private:
  bool AllFinished(uint64_t number) const;
  Slot& mine() const { return room_->board().slots[lane_][rank_]; }

  Room* const room_;
  const int rank_;
  const Lane lane_;
  const uint64_t number_;
  bool posted_ = false;
};

// A whole meeting in the host lane. Fills `all`, by rank. Ends early when the room has
// failed or `stopped` says so.
nccl::Result MeetOnHost(Room* room, int rank, uint64_t number, const Posted& posted,
                        const std::function<bool()>& stopped, std::vector<Posted>* all);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_MEETING_H_
