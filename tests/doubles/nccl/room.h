// A room: the shared memory in which the ranks of one communicator meet, be they
// threads of one process or processes of one host. It holds words about the data and
// never the data: a rank reads its peers' buffers where they are, its own process's
// directly, another's by process_vm_readv.
//
// Nothing has a name in /dev/shm: the memory is a memfd of the process that made the
// unique id, which the others open through /proc. It is gone with the last process.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_ROOM_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_ROOM_H_

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/nccl/library/nccl_api.h"

namespace jaxcomm::fake {

// A process of this host, told apart from later ones with the same pid.
struct Process {
  int32_t pid;
  uint64_t start_time;  // in ticks since boot
};

Process ThisProcess();

// False also for one that ended and whose parent has not looked yet.
bool IsAlive(const Process& process);

// Copies from the memory of another process; 0 or an errno.
int ReadMemory(const Process& process, uint64_t address, void* to, size_t bytes);

inline constexpr int kMaxRanks = 64;

// What a rank says to the others: the arguments of its call.
struct Posted {
  int32_t kind;
  int32_t type;
  int32_t op;    // split: key
  int32_t root;  // split: color
  uint64_t count;
  uint64_t address;      // of its send buffer, in its own process
  nccl::UniqueId child;  // split: of the room it would lead a group in
};

// Where one rank posts its collectives, one after the other.
struct Slot {
  uint64_t arrived;   // the number of the one posted
  uint64_t finished;  // the number of the last that it needs nobody's buffer for
  uint64_t readers;   // bit r: rank r may be reading this rank's buffer
  Posted posted;
};

// Where one rank posts its sends to one peer.
struct Pair {
  enum State : int32_t { kEmpty, kSent, kTaken };
  int32_t state;
  int32_t reading;  // the receiver may be reading the sender's buffer
  Posted posted;
};

struct Member {
  enum State : int32_t { kAbsent, kHere, kLeft };
  int32_t state;
  int32_t device;
  Process process;
  // It was aborted in an operation: its kernel told the others of steps whose bytes it
  // never wrote, so that theirs end too, without an error and without a result.
  int32_t aborted = 0;
};

// Operations of streams, and calls that return when all ranks have made them.
enum Lane { kStreamLane, kHostLane };

// Everything below the mutex belongs to it.
struct Board {
  pthread_mutex_t mutex;       // shared by processes, and survives them
  std::atomic<uint32_t> bell;  // a futex, rung at every change
  uint64_t nonce;
  Process maker;
  int32_t size;  // 0 until the first rank comes
  int32_t joined;
  int32_t failure;  // a nccl::Result, the same for all
  char failure_text[256];
  Member members[kMaxRanks];
  Slot slots[2][kMaxRanks];
  Pair pairs[kMaxRanks][kMaxRanks];  // [from][to]
};

class Room {
 public:
  static nccl::Result Create(nccl::UniqueId* id);
  static nccl::Result Find(const nccl::UniqueId& id, std::shared_ptr<Room>* room);
  ~Room();

  // Holds the room's mutex.
  class Lock {
   public:
    explicit Lock(Room& room);
    ~Lock();
    void Release();
    void Acquire();

   private:
    Room& room_;
  };

  // For holders of the lock. Wait returns after any change, and at the latest after
  // 10 ms. With `notices_death` it looks whether all are still alive, as NCCL does by
  // its sockets while ranks join or split; its kernels wait for a dead peer for ever.
  Board& board() { return *board_; }
  void Ring();
  void Wait(Lock* lock, bool notices_death = false);
  // Says to all ranks what went wrong; the first time counts.
  void Fail(nccl::Result result, const std::string& text);
  bool IsAlive(int rank);

  // Without the lock: copies from a buffer of `rank`. False, and the room has failed,
  // if it cannot be read.
  bool Read(int rank, uint64_t address, void* to, size_t bytes);

  // The room need not be found any more: all ranks are here, or none will come.
  static void Forget(const nccl::UniqueId& id);

 private:
  Room(Board* board, int fd) : board_(board), fd_(fd) {}

  Board* const board_;
  const int fd_;  // -1 where another process made it
};

// All ranks of a communicator meet to show each other a Posted: a collective of a
// stream, or a call that all ranks make. Nobody leaves before all have read. All
// functions are for holders of the room's lock.
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

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_ROOM_H_
