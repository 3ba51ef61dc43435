// Rooms of shared memory, and the processes that meet there.
#include "tests/doubles/nccl/room.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>

#include "ffi/os/system_file.h"
#include "tests/doubles/nccl/failed.h"

namespace jaxcomm::fake {
namespace {

// From /proc/<pid>/stat: the state and the start time. False if there is no process.
bool Look(int pid, char* state, uint64_t* start_time) {
  const std::string text = ReadSystemFile("/proc/" + std::to_string(pid) + "/stat");
  // The second field is the program's name and may contain anything, also ")".
  const char* field = std::strrchr(text.c_str(), ')');
  if (field == nullptr) return false;
  *state = field[2];
  constexpr int kStartTime = 22;  // counted from 1, as proc(5) does
  for (int i = 2; i < kStartTime && field != nullptr; ++i) {
    field = std::strchr(field + 1, ' ');
  }
  if (field == nullptr) return false;
  *start_time = std::strtoull(field + 1, nullptr, 10);
  return true;
}

}  // namespace

Process ThisProcess() {
  // Where Yama guards memory, siblings may read it only if asked in.
  (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  Process process{getpid(), 0};
  char state = 0;
  (void)Look(process.pid, &state, &process.start_time);
  return process;
}

bool IsAlive(const Process& process) {
  char state = 0;
  uint64_t start_time = 0;
  return Look(process.pid, &state, &start_time) && start_time == process.start_time &&
         state != 'Z' && state != 'X';
}

int ReadMemory(const Process& process, uint64_t address, void* to, size_t bytes) {
  auto* out = static_cast<char*>(to);
  while (bytes > 0) {
    iovec local{out, bytes};
    iovec remote{reinterpret_cast<void*>(address), bytes};
    const ssize_t read = process_vm_readv(process.pid, &local, 1, &remote, 1, 0);
    if (read < 0) return errno;
    if (read == 0) return EFAULT;
    out += read;
    address += static_cast<uint64_t>(read);
    bytes -= static_cast<size_t>(read);
  }
  return 0;
}

namespace {

constexpr char kMagic[8] = "jaxfake";
constexpr long kPollNanoseconds = 10 * 1000 * 1000;

// What a UniqueId holds.
struct Address {
  char magic[8];
  uint64_t nonce;
  Process maker;
  int32_t fd;
};
static_assert(sizeof(Address) <= sizeof(nccl::UniqueId));

// The rooms of this process, so that its ranks share one mapping.
struct Rooms {
  std::map<uint64_t, std::weak_ptr<Room>> known;
  // Those made here that others may still have to find.
  std::map<uint64_t, std::shared_ptr<Room>> made;
};

nccl::Result SystemFailure(const std::string& what) {
  return Failure(nccl::kSystemError, what + ": " + std::strerror(errno));
}

Board* Map(int fd) {
  void* const mapped =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<Board*>(mapped);
}

}  // namespace

nccl::Result Room::Create(nccl::UniqueId* id) {
  const int fd = memfd_create("jaxcomm-fake-nccl", MFD_CLOEXEC);
  if (fd < 0) return SystemFailure("memfd_create failed");
  if (ftruncate(fd, sizeof(Board)) != 0) return SystemFailure("ftruncate failed");
  Board* const board = Map(fd);
  if (board == nullptr) return SystemFailure("mmap failed");

  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&board->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  std::random_device random;
  board->nonce = (static_cast<uint64_t>(random()) << 32) | random();
  board->maker = ThisProcess();

  Address address{};
  std::memcpy(address.magic, kMagic, sizeof(kMagic));
  address.nonce = board->nonce;
  address.maker = board->maker;
  address.fd = fd;
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id, &address, sizeof(address));

  std::shared_ptr<Room> room(new Room(board, fd));
  Locked<Rooms> rooms;
  rooms->known[board->nonce] = room;
  rooms->made[board->nonce] = std::move(room);
  return nccl::kSuccess;
}

nccl::Result Room::Find(const nccl::UniqueId& id, std::shared_ptr<Room>* room) {
  Address address;
  std::memcpy(&address, &id, sizeof(address));
  if (std::memcmp(address.magic, kMagic, sizeof(kMagic)) != 0) {
    return Failure(nccl::kInvalidArgument,
                   "The unique id was not made by this library");
  }
  Locked<Rooms> rooms;
  if (const auto known = rooms->known.find(address.nonce);
      known != rooms->known.end()) {
    *room = known->second.lock();
    if (*room != nullptr) return nccl::kSuccess;
  }
  const std::string path = "/proc/" + std::to_string(address.maker.pid) + "/fd/" +
                           std::to_string(address.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return Failure(nccl::kRemoteError,
                   "The process that made the unique id is gone, or the id was used");
  }
  struct stat info;
  Board* const board =
      fstat(fd, &info) == 0 && info.st_size == sizeof(Board) ? Map(fd) : nullptr;
  close(fd);
  if (board == nullptr || board->nonce != address.nonce) {
    if (board != nullptr) munmap(board, sizeof(Board));
    return Failure(nccl::kInvalidArgument, "The unique id was used before");
  }
  room->reset(new Room(board, -1));
  rooms->known[address.nonce] = *room;
  return nccl::kSuccess;
}

void Room::Forget(const nccl::UniqueId& id) {
  Address address;
  std::memcpy(&address, &id, sizeof(address));
  std::shared_ptr<Room> made;  // destroyed after the lock is gone
  Locked<Rooms> rooms;
  const auto found = rooms->made.find(address.nonce);
  if (found == rooms->made.end()) return;
  made = std::move(found->second);
  rooms->made.erase(found);
}

Room::~Room() {
  {
    Locked<Rooms> rooms;
    const auto known = rooms->known.find(board_->nonce);
    if (known != rooms->known.end() && known->second.expired())
      rooms->known.erase(known);
  }
  if (fd_ >= 0) close(fd_);
  munmap(board_, sizeof(Board));
}

Room::Lock::Lock(Room& room) : room_(room) { Acquire(); }
Room::Lock::~Lock() { Release(); }

void Room::Lock::Acquire() {
  pthread_mutex_t* const mutex = &room_.board_->mutex;
  if (pthread_mutex_lock(mutex) == EOWNERDEAD) {
    pthread_mutex_consistent(mutex);
    room_.Fail(nccl::kRemoteError, "A peer process died in the middle of a call");
  }
}

void Room::Lock::Release() { pthread_mutex_unlock(&room_.board_->mutex); }

void Room::Ring() {
  board_->bell.fetch_add(1);
  syscall(SYS_futex, &board_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Room::Wait(Lock* lock, bool notices_death) {
  const uint32_t heard = board_->bell.load();
  lock->Release();
  const timespec timeout{0, kPollNanoseconds};
  const long woken =
      syscall(SYS_futex, &board_->bell, FUTEX_WAIT, heard, &timeout, nullptr, 0);
  const bool timed_out = woken != 0 && errno == ETIMEDOUT;
  lock->Acquire();
  // Meanwhile all may have come, and one of them may have died since.
  const bool silence = timed_out && board_->bell.load() == heard;
  if (!silence || !notices_death) return;
  if (board_->joined < board_->size && !fake::IsAlive(board_->maker)) {
    Fail(nccl::kRemoteError, "The process that made the unique id died");
  }
  for (int rank = 0; rank < board_->size; ++rank) {
    if (!IsAlive(rank)) {
      Fail(nccl::kRemoteError, "The process of rank " + std::to_string(rank) + " died");
    }
  }
}

bool Room::IsAlive(int rank) {
  const Member& member = board_->members[rank];
  return member.state != Member::kHere || member.process.pid == getpid() ||
         fake::IsAlive(member.process);
}

void Room::Fail(nccl::Result result, const std::string& text) {
  if (board_->failure != nccl::kSuccess) return;
  board_->failure = result;
  std::strncpy(board_->failure_text, text.c_str(), sizeof(board_->failure_text) - 1);
  Ring();
}

bool Room::Read(int rank, uint64_t address, void* to, size_t bytes) {
  if (bytes == 0) return true;
  const Process& process = board_->members[rank].process;
  if (process.pid == getpid()) {
    std::memcpy(to, reinterpret_cast<const void*>(address), bytes);
    return true;
  }
  const int error = ReadMemory(process, address, to, bytes);
  if (error == 0) return true;
  Lock lock(*this);
  if (error == ESRCH) {
    Fail(nccl::kRemoteError, "The process of rank " + std::to_string(rank) + " died");
  } else {
    Fail(nccl::kSystemError,
         "Cannot read the memory of rank " + std::to_string(rank) +
             "'s process (process_vm_readv): " + std::strerror(error));
  }
  return false;
}

}  // namespace jaxcomm::fake
