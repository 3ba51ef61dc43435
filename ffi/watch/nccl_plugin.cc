// A profiler plugin for NCCL: a library of its own, which NCCL loads by
// NCCL_PROFILER_PLUGIN. It writes what each communicator does into a Ring, in the file
// nccl-<JAX_PROCESS_ID>.ring of the folder JAXCOMM_WATCH_DIR.
//
// The declarations here follow what NCCL calls, in versions 4 to 6 of its interface.
// They differ in the order of the first arguments, and in the width of an event's type.
// Callbacks of events take no lock and allocate nothing.
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>

#include "ffi/watch/ring.h"

namespace jaxcomm {
namespace {

enum EventType : uint64_t {
  kCollective = 1 << 1,
  kPeerToPeer = 1 << 2,
  kKernel = 1 << 6
};

// A handle names an operation, not a place: the ring may overwrite it while it runs.
// From above: whether it is an event of a GPU's channel, the block, the number.
constexpr uint64_t kKernelBit = uint64_t{1} << 62;
constexpr int kBlockShift = 48;
constexpr uint64_t kNumberMask = (uint64_t{1} << kBlockShift) - 1;
// NCCL calls no more about an event without a handle. Most have none: it announces
// those of groups and of its interface, too, whatever the mask says.
constexpr uint64_t kNoHandle = 0;

// What NCCL hands in. The rest begins at byte 24 in all versions.
struct Event {
  uint64_t type;  // version 4: its lowest byte alone
  void* parent;
  int32_t rank;
  int32_t unused;
  unsigned char rest[96];

  template <typename T>
  T At(size_t offset) const {
    T value;
    std::memcpy(&value, rest + offset, sizeof(value));
    return value;
  }
};

std::mutex opening;
Ring* ring = nullptr;
bool has_failed = false;

// Some milliseconds coarse, and a tenth of the price.
int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

int NumberOf(const char* variable, int absent) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == 0 ? absent : std::atoi(text);
}

// Fills all bytes, so that a reader finds no old ones. The last need not be 0.
template <size_t size>
void Copy(char (&to)[size], const char* from) {
  for (char& each : to) each = from == nullptr || *from == 0 ? 0 : *from++;
}

// Shorter names, so that they fit: AllReduce, ReduceScatter ...
void CopyCollective(char (&to)[8], const char* from) {
  constexpr struct {
    const char* name;
    const char* code;
  } kNames[] = {{"AllReduce", "allred"},     {"AllGather", "allgat"},
                {"ReduceScatter", "redsca"}, {"Broadcast", "bcast"},
                {"Reduce", "reduce"},        {"AlltoAll", "alltoal"}};
  for (const auto& [name, code] : kNames) {
    if (from != nullptr && std::strcmp(from, name) == 0) from = code;
  }
  Copy(to, from);
}

// "ncclFloat32" -> "Float32".
void CopyDtype(char (&to)[8], const char* from) {
  if (from != nullptr && std::strncmp(from, "nccl", 4) == 0) from += 4;
  Copy(to, from);
}

// Locks a file for as long as this process lives. False: another one has locked it.
bool Lock(int file) {
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return fcntl(file, F_SETLK, &whole) == 0 || (errno != EACCES && errno != EAGAIN);
}

const char* Open(int version) {
  const char* folder = std::getenv("JAXCOMM_WATCH_DIR");
  if (folder == nullptr || *folder == 0) return "JAXCOMM_WATCH_DIR is not set";
  char path[4096];
  const int process = NumberOf("JAX_PROCESS_ID", 0);
  const int length =
      std::snprintf(path, sizeof(path), "%s/nccl-%d.ring", folder, process);
  if (length < 0 || length >= static_cast<int>(sizeof(path))) return "too long a path";
  const int earlier = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  // A program that the watched one starts has its environment, and may use NCCL, too.
  if (earlier >= 0 && !Lock(earlier)) {
    close(earlier);
    return "a process of the same JAX_PROCESS_ID, which still runs, writes them";
  }
  unlink(path);
  const int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (earlier >= 0) close(earlier);
  if (file < 0) return std::strerror(errno);
  // Before others can take it for one that is over. The file stays open.
  (void)Lock(file);
  // Reserved now: a page that a full disk cannot hold would end the process.
  if (const int problem = posix_fallocate(file, 0, sizeof(Ring)); problem != 0) {
    close(file);
    unlink(path);
    return std::strerror(problem);
  }
  void* at = mmap(nullptr, sizeof(Ring), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) {
    const int problem = errno;
    close(file);
    return std::strerror(problem);
  }
  ring = static_cast<Ring*>(at);
  ring->pid = getpid();
  ring->process = process;
  ring->processes = NumberOf("JAX_NUM_PROCESSES", 1);
  ring->interface_version = version;
  ring->has_kernels = NumberOf("JAXCOMM_WATCH_KERNELS", 1) != 0;
  ring->began_ns = NowNs();
  ring->magic.store(kRingMagic, std::memory_order_release);
  return nullptr;
}

// Returns a free block, else one whose communicator has ended.
RingBlock* TakeBlock() {
  for (const bool closed : {false, true}) {
    for (RingBlock& block : ring->blocks) {
      if (closed ? block.is_closed.load() != 0 : block.id.load() == 0) return &block;
    }
  }
  return nullptr;
}

// Never fails: a watch that cannot be had must not end the program.
int Init(void** context, int* mask, const char* name, uint64_t id, int ranks, int rank,
         int version) {
  *context = nullptr;
  *mask = 0;
  const std::lock_guard<std::mutex> lock(opening);
  if (ring == nullptr && !has_failed) {
    if (const char* problem = Open(version)) {
      has_failed = true;
      std::fprintf(stderr,
                   "jaxcomm: NCCL is not watched: no file for its records: %s\n",
                   problem);
    }
  }
  if (ring == nullptr) return 0;
  // The mask is one for all communicators of the process. NCCL loses events of the GPU
  // if it changes later.
  *mask = kCollective | kPeerToPeer;
  if (ring->has_kernels != 0) *mask |= kKernel;
  // Ours have records of their own.
  if (name != nullptr && std::strncmp(name, "jaxcomm", 7) == 0) return 0;
  RingBlock* block = TakeBlock();
  if (block == nullptr) {
    ring->left_out.fetch_add(1);
    return 0;
  }
  block->id.store(0);
  block->is_closed.store(0);
  block->kernels.store(0);
  block->count.store(0);
  for (auto& order : block->orders) order.store(0);
  for (RingOperation& operation : block->operations) operation.number.store(0);
  block->rank = rank;
  block->ranks = ranks;
  Copy(block->name, name);
  block->id.store(id == 0 ? 1 : id);
  *context = block;
  return 0;
}

constexpr uint64_t kOneBegun = uint64_t{1} << 16;
constexpr uint64_t kOneEnded = 1;
constexpr int kOrderShift = 32;
constexpr int kPeerShift = 63;

// Counts a channel's event. False: the ring has lost the operation.
bool Count(uint64_t handle, uint64_t one) {
  const uint64_t number = handle & kNumberMask;
  RingBlock& block = ring->blocks[(handle >> kBlockShift) % kRingBlocks];
  RingOperation& operation = block.operations[(number - 1) % kRingOperations];
  uint64_t state = operation.state.load(std::memory_order_acquire);
  do {
    if (operation.number.load(std::memory_order_acquire) != number) return false;
    if (one == kOneEnded) {
      operation.ended_ns.store(NowNs(), std::memory_order_relaxed);
    }
  } while (!operation.state.compare_exchange_weak(
      state, state + one, std::memory_order_acq_rel, std::memory_order_acquire));
  return true;
}

uint64_t Enqueue(RingBlock* block, const Event& event, bool is_peer) {
  const uint64_t number = block->count.fetch_add(1, std::memory_order_relaxed) + 1;
  RingOperation& operation = block->operations[(number - 1) % kRingOperations];
  // Nothing of the new one is there before the old number is gone.
  operation.number.exchange(0, std::memory_order_acq_rel);
  operation.enqueued_ns = NowNs();
  operation.ended_ns.store(0, std::memory_order_relaxed);
  const uint64_t order =
      block->orders[is_peer].fetch_add(1, std::memory_order_relaxed) + 1;
  operation.state.store(uint64_t{is_peer} << kPeerShift | (order & 0x7fffffff)
                                                              << kOrderShift,
                        std::memory_order_release);
  if (is_peer) {
    CopyCollective(operation.collective, event.At<const char*>(0));
    CopyDtype(operation.dtype, event.At<const char*>(16));
    operation.count = event.At<uint64_t>(24);
    operation.peer = event.At<int32_t>(32);
    operation.channels = event.At<uint8_t>(36);
  } else {
    CopyCollective(operation.collective, event.At<const char*>(8));
    operation.count = event.At<uint64_t>(32);
    operation.peer = event.At<int32_t>(40);
    CopyDtype(operation.dtype, event.At<const char*>(48));
    operation.channels = event.At<uint8_t>(56);
  }
  operation.number.store(number, std::memory_order_release);
  return static_cast<uint64_t>(block - ring->blocks) << kBlockShift | number;
}

int Start(void* context, void** handle, const Event& event, uint64_t type) {
  uint64_t made = kNoHandle;
  const auto parent = reinterpret_cast<uint64_t>(event.parent);
  if (type == kKernel && parent != 0) {
    RingBlock& block = ring->blocks[(parent >> kBlockShift) % kRingBlocks];
    if (block.kernels.load(std::memory_order_relaxed) == 0) {
      block.kernels.store(1, std::memory_order_relaxed);
    }
    if (Count(parent, kOneBegun)) made = parent | kKernelBit;
  } else if (context != nullptr && (type == kCollective || type == kPeerToPeer)) {
    const uint64_t number =
        Enqueue(static_cast<RingBlock*>(context), event, type == kPeerToPeer);
    // The parent of the events of the GPU.
    if (ring->has_kernels != 0) made = number;
  }
  *handle = reinterpret_cast<void*>(made);
  return 0;
}

int Start4(void* context, void** handle, void* event) {
  const auto* given = static_cast<const Event*>(event);
  return Start(context, handle, *given, given->type & 0xff);
}

int Start5(void* context, void** handle, void* event) {
  const auto* given = static_cast<const Event*>(event);
  return Start(context, handle, *given, given->type);
}

// The end of a collective's own event says that it is enqueued, not that it has ended.
int Stop(void* handle) {
  const auto given = reinterpret_cast<uint64_t>(handle);
  if ((given & kKernelBit) != 0) Count(given, kOneEnded);
  return 0;
}

int RecordState(void*, int, void*) { return 0; }

int Finalize(void* context) {
  if (context != nullptr) static_cast<RingBlock*>(context)->is_closed.store(1);
  return 0;
}

int Init4(void** context, int* mask, const char* name, uint64_t id, int, int ranks,
          int rank, void*) {
  return Init(context, mask, name, id, ranks, rank, 4);
}

template <int version>
int Init5(void** context, uint64_t id, int* mask, const char* name, int, int ranks,
          int rank, void*) {
  return Init(context, mask, name, id, ranks, rank, version);
}

struct Calls4 {
  const char* name;
  int (*init)(void**, int*, const char*, uint64_t, int, int, int, void*);
  int (*start)(void*, void**, void*);
  int (*stop)(void*);
  int (*record_state)(void*, int, void*);
  int (*finalize)(void*);
};

struct Calls5 {
  const char* name;
  int (*init)(void**, uint64_t, int*, const char*, int, int, int, void*);
  int (*start)(void*, void**, void*);
  int (*stop)(void*);
  int (*record_state)(void*, int, void*);
  int (*finalize)(void*);
};

}  // namespace
}  // namespace jaxcomm

extern "C" {
#pragma GCC visibility push(default)
jaxcomm::Calls4 ncclProfiler_v4 = {
    "jaxcomm",     jaxcomm::Init4,       jaxcomm::Start4,
    jaxcomm::Stop, jaxcomm::RecordState, jaxcomm::Finalize};
jaxcomm::Calls5 ncclProfiler_v5 = {
    "jaxcomm",     jaxcomm::Init5<5>,    jaxcomm::Start5,
    jaxcomm::Stop, jaxcomm::RecordState, jaxcomm::Finalize};
jaxcomm::Calls5 ncclProfiler_v6 = {
    "jaxcomm",     jaxcomm::Init5<6>,    jaxcomm::Start5,
    jaxcomm::Stop, jaxcomm::RecordState, jaxcomm::Finalize};
#pragma GCC visibility pop
}
