// One operation of one rank: as it was called, its arithmetic, and under way.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_OPERATION_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ffi/backends/nccl/library/nccl_api.h"
#include "tests/doubles/nccl/room.h"

namespace jaxcomm::fake {

enum Kind : int {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAlltoAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
  // These meet on the host:
  kSplit,
  kWindowRegister,
};

// As the function is called: "ncclAllReduce".
const char* Name(int kind);

inline bool IsReduction(Kind kind) {
  return kind == kAllReduce || kind == kReduce || kind == kReduceScatter;
}

inline bool HasRoot(Kind kind) {
  return kind == kReduce || kind == kBroadcast || kind == kGather || kind == kScatter;
}

inline constexpr int kNobody = -1;

struct Operation {
  Kind kind;
  const void* send;
  void* recv;
  size_t count;
  nccl::Type type;
  nccl::RedOp op = nccl::RedOp::kSum;  // of reductions
  int peer = kNobody;                  // or root
  bool hangs = false;                  // a test wants it never to complete
  bool connects = false;               // or its call never to return
};

// Bytes of an element; 0 for no type of ours.
size_t TypeBytes(nccl::Type type);

// Whether it has the reduction for the type: averages are for the wide floats alone.
bool IsRedOp(nccl::RedOp op, nccl::Type type);

// What an average does to the operand of each rank before it adds them.
void Premultiply(nccl::Type type, int ranks, void* data, size_t count);

// to[i] = to[i] op from[i]. 16-bit floats are widened for each step and rounded after
// it, and minimum and maximum pass over NaN, as NCCL's kernels do.
void Accumulate(nccl::Type type, nccl::RedOp op, const void* from, void* to,
                size_t count);

// An operation under way: a small machine that a stream's thread turns, among others
// of its group, until it is done.
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

// If it is a collective, the `number`-th of the communicator, from 1.
std::unique_ptr<Exchange> MakeExchange(Room* room, int rank, uint64_t number,
                                       const Operation& operation);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_OPERATION_H_
