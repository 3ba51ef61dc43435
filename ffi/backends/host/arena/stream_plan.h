// How the moves of a plan cross between processes: which chunks each process stages
// for which others, and what it reads, in an order that cannot block.
//
// Every process derives the same stream plan from the same moves. Within a process
// bytes go straight from operand to result. A reduction over several ranks of one
// process is staged as one partial result, if its type accumulates in itself and the
// order of the reduction stays the same: see reduce.h.
//
// Large all-reduces between more than two processes go in two phases (reduce-scatter,
// then all-gather: Rabenseifner's algorithm, chunk by chunk): the owner of a piece
// reduces it and stages the result, so that nobody reads every piece of everybody.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_ARENA_STREAM_PLAN_H_
#define JAXCOMM_FFI_BACKENDS_HOST_ARENA_STREAM_PLAN_H_

#include <cstdint>
#include <vector>

#include "ffi/backends/host/reduce/host_plan.h"
#include "ffi/core/plan.h"

namespace jaxcomm {

// Where chunk `chunk` of a process lies: in a slot, or at `offset` of its inline data.
struct Chunk {
  int process = 0;
  int64_t chunk = 0;
  int64_t offset = 0;
};

// One chunk this process writes.
struct Stage {
  enum What {
    kCopy,    // of the operands of `ranks`, one after the other
    kReduce,  // of the operands of `ranks`, into one
    kResult,  // of what read `after` - 1 put into the result of ranks[0]
  };
  What what = kCopy;
  Block piece;
  std::vector<int> ranks;
  std::vector<int> local_targets;  // of this process; copied to on the way
  uint64_t readers = 0;            // mask of processes
  int64_t offset = 0;              // in the inline data
  int64_t after = 0;               // reads to be done before
};

// A source of a piece that is read: rank's operand, or a part of a chunk.
struct Source {
  int rank = -1;  // >= 0: an operand of this process
  Chunk chunk;
  int64_t part = 0;  // the how-many-th operand in the chunk
};

// One piece this process writes into its results.
struct Read {
  Block piece;
  std::vector<Source> sources;  // in the order in which they are combined; none: a fill
  std::vector<int> targets;     // ranks of this process
  bool staged = false;          // a kResult stage follows
  bool running = false;         // targets[i] takes the first prefix[i] sources
  std::vector<int> prefix;
};

struct StreamPlan {
  bool is_inline = false;  // everything fits into the inline data
  int window = 0;          // chunks in flight
  std::vector<Stage> stages;
  std::vector<Read> reads;
  std::vector<int> local_moves;  // wholly within this process
};

// Plans for process `self` of a group whose rank r lives in process process_of[r].
StreamPlan MakeStreamPlan(const HostPlan& plan, const std::vector<Leaf>& leaves,
                          const std::vector<int>& process_of, int self);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_ARENA_STREAM_PLAN_H_
