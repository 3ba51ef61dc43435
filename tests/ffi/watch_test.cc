// Tests the library that NCCL loads under load: a thread for each communicator, one
// for the events of its GPU, and a reader of the file, as another process reads it.
#include <atomic>
#include <thread>

// A library of its own, which nothing links.
#include "ffi/watch/nccl_plugin.cc"
#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

using Announcement = ::jaxcomm::Event;

constexpr int kCommunicators = 4;
constexpr uint64_t kEach = 20000;
constexpr uint64_t kChannels = 2;

Announcement Announced(EventType type, void* parent = nullptr) {
  Announcement event = {};
  event.type = type;
  event.parent = parent;
  return event;
}

template <typename T>
void Put(Announcement& event, size_t offset, T value) {
  std::memcpy(event.rest + offset, &value, sizeof(value));
}

// The count tells which one it is.
void* Enqueued(void* context, uint64_t number) {
  Announcement event = Announced(kCollective);
  Put(event, 8, number % 2 != 0 ? "AllReduce" : "AllGather");
  Put(event, 32, number);
  Put(event, 48, "ncclFloat32");
  Put(event, 56, static_cast<uint8_t>(kChannels));
  void* handle = nullptr;
  ncclProfiler_v5.start(context, &handle, &event);
  ncclProfiler_v5.stop(handle);
  return handle;
}

void RunOnGpu(void* context, void* operation) {
  for (uint64_t i = 0; i < kChannels; ++i) {
    Announcement event = Announced(kKernel, operation);
    void* handle = nullptr;
    ncclProfiler_v5.start(context, &handle, &event);
    // Of one that the ring has lost there is none.
    if (handle != nullptr) ncclProfiler_v5.stop(handle);
  }
}

std::string Folder() {
  char path[] = "/tmp/jaxcomm-watch-XXXXXX";
  CHECK_TRUE(mkdtemp(path) != nullptr);
  setenv("JAXCOMM_WATCH_DIR", path, 1);
  return path;
}

// Whether an operation was not written between two reads. One read of 64 bytes may have
// a new number, and the rest of the old operation.
bool IsWhole(const RingOperation& one, const RingOperation& later) {
  const auto same = [&](size_t begin, size_t end) {
    const auto bytes = [&](const RingOperation& of) {
      return std::string_view(reinterpret_cast<const char*>(&of) + begin, end - begin);
    };
    return bytes(one) == bytes(later);
  };
  return same(0, 16) && same(24, 32) && same(36, 64);
}

// As jaxcomm/diagnostics/ring.py reads: all of it, then once more.
uint64_t Torn(int file) {
  static RingBlock blocks[kCommunicators], later[kCommunicators];
  const size_t begin = offsetof(Ring, blocks);
  if (pread(file, blocks, sizeof(blocks), begin) != sizeof(blocks)) return 1;
  if (pread(file, later, sizeof(later), begin) != sizeof(later)) return 1;
  uint64_t torn = 0;
  for (int b = 0; b < kCommunicators; ++b) {
    const uint64_t count = later[b].count.load();
    for (const RingOperation& operation : blocks[b].operations) {
      const uint64_t number = operation.number.load();
      if (number == 0 || number + kRingOperations <= count) continue;
      const auto place = &operation - blocks[b].operations;
      if (!IsWhole(operation, later[b].operations[place])) continue;
      const bool is_sum = std::strncmp(operation.collective, "allred", 8) == 0;
      torn += operation.count != number || is_sum != (number % 2 != 0) ||
              (operation.state.load() >> kOrderShift) != number ||
              (operation.state.load() & 0xffff) > kChannels;
    }
  }
  return torn;
}

TEST(a_reader_finds_no_torn_operation) {
  const std::string folder = Folder();
  std::atomic<bool> done{false};
  void* contexts[kCommunicators] = {};
  int mask = 0;
  const auto is_watched_in_a_child = [&] {
    return Child([&] {
             ring = nullptr;
             void* context = nullptr;
             ncclProfiler_v5.init(&context, 1, &mask, "", 1, 2, 0, nullptr);
             _exit(context != nullptr && mask != 0);
           }).Wait() == 1;
  };
  // Its file is that of an earlier process.
  CHECK_TRUE(is_watched_in_a_child());
  for (int i = 0; i < kCommunicators; ++i) {
    ncclProfiler_v5.init(&contexts[i], i + 1, &mask, "", 1, 2, 0, nullptr);
    CHECK_TRUE(contexts[i] != nullptr);
  }
  CHECK_EQ(mask, static_cast<int>(kCollective | kPeerToPeer | kKernel));
  const std::string path = folder + "/nccl-0.ring";
  // A process that this one starts leaves the file alone.
  CHECK_TRUE(!is_watched_in_a_child());
  const int file = open(path.c_str(), O_RDONLY);
  uint64_t magic = 0;
  CHECK_EQ(pread(file, &magic, sizeof(magic), 0), static_cast<ssize_t>(sizeof(magic)));
  CHECK_EQ(magic, kRingMagic);
  CHECK_EQ(ring->pid, getpid());
  uint64_t torn = 0;
  std::thread reader([&] {
    while (!done.load()) torn += Torn(file);
  });
  std::vector<std::thread> threads;
  for (void* context : contexts) {
    threads.emplace_back([context] {
      std::atomic<void*> handed[kRingOperations] = {};
      std::thread gpu([&] {
        for (uint64_t i = 0; i < kEach; ++i) {
          void* operation = nullptr;
          while ((operation = handed[i % kRingOperations].exchange(nullptr)) ==
                 nullptr) {
            std::this_thread::yield();
          }
          RunOnGpu(context, operation);
        }
      });
      for (uint64_t i = 0; i < kEach; ++i) {
        auto& slot = handed[i % kRingOperations];
        while (slot.load() != nullptr) std::this_thread::yield();
        slot.store(Enqueued(context, i + 1));
      }
      gpu.join();
    });
  }
  for (std::thread& thread : threads) thread.join();
  done.store(true);
  reader.join();
  CHECK_EQ(torn, uint64_t{0});
  CHECK_EQ(Torn(file), uint64_t{0});
  for (const RingBlock& block : ring->blocks) {
    if (block.id.load() == 0) continue;
    CHECK_EQ(block.count.load(), kEach);
    for (const RingOperation& operation : block.operations) {
      CHECK_EQ((operation.state.load() & 0xffff), kChannels);
    }
  }
  // A communicator that ended leaves room for 64 more.
  for (void* context : contexts) ncclProfiler_v5.finalize(context);
  for (int i = 0; i < kRingBlocks; ++i) {
    void* context = nullptr;
    ncclProfiler_v5.init(&context, 100 + i, &mask, "", 1, 2, 0, nullptr);
    CHECK_TRUE(context != nullptr);
  }
  CHECK_EQ(ring->left_out.load(), 0u);
  void* none = nullptr;
  ncclProfiler_v5.init(&none, 999, &mask, "", 1, 2, 0, nullptr);
  CHECK_TRUE(none == nullptr);
  CHECK_EQ(ring->left_out.load(), 1u);
  Enqueued(none, 1);
  close(file);
  unlink(path.c_str());
  rmdir(folder.c_str());
}

TEST(late_events_are_not_taken_for_those_of_a_new_operation) {
  RingBlock& block = ring->blocks[0];
  const uint64_t first = block.count.load() + 1;
  void* late = Enqueued(&block, first);
  for (uint64_t i = 1; i <= kRingOperations; ++i) Enqueued(&block, first + i);
  RunOnGpu(&block, late);
  for (const RingOperation& operation : block.operations) {
    CHECK_EQ(operation.state.load() & 0xffffffff, uint64_t{0});
  }
}

TEST(what_is_of_no_interest_has_no_handle) {
  for (const int type : {1, 8, 16, 256, 512, 1024}) {
    Announcement event = Announced(static_cast<EventType>(type));
    void* handle = &event;
    ncclProfiler_v5.start(ring->blocks, &handle, &event);
    CHECK_TRUE(handle == nullptr);
  }
}

}  // namespace
}  // namespace jaxcomm::testing
