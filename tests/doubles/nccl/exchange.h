// An operation under way: a small machine that a stream's thread turns, among others
// of its group, until it is done.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_EXCHANGE_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_EXCHANGE_H_

#include <cstdint>
#include <memory>

#include "tests/doubles/nccl/operation.h"
#include "tests/doubles/nccl/room.h"

namespace jaxcomm::fake {

class Exchange {
 public:
  virtual ~Exchange() = default;

  // Does what can be done now, perhaps without the lock for a while, and says whether
  // that was anything.
  virtual bool Advance(Room::Lock* lock) = 0;

  // Gives up; returns when no peer reads this rank's buffer any more.
  virtual void Withdraw(Room::Lock* lock) = 0;

  bool done() const { return done_; }

 protected:
  bool done_ = false;
};

// The `number`-th collective of the communicator, from 1.
std::unique_ptr<Exchange> MakeCollective(Room* room, int rank, uint64_t number,
                                         const Operation& operation);

std::unique_ptr<Exchange> MakeSend(Room* room, int rank, const Operation& operation);
std::unique_ptr<Exchange> MakeRecv(Room* room, int rank, const Operation& operation);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_EXCHANGE_H_
