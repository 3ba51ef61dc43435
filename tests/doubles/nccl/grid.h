// A kernel's threads, each a thread of the host.
//
// Threads of a launch may wait for each other, and for those of other launches: a small
// sum waits for the other ranks'. So no launch may wait for a host thread that another
// has: a launch runs on its stream's thread and on threads that it starts. For the same
// reason no host thread runs one device thread after another.
//
// A launch gets at most four host threads, and runs as a launch of so few threads: of
// at most two blocks. That changes no result, since a kernel of kernels.h does its work
// with any number of blocks and threads.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_GRID_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_GRID_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace jaxcomm::fake {

// Runs `kernel` on every thread, and returns when all have ended. A fault of the device
// ends them where they are.
void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& kernel);

// What follows is for the threads of a kernel.

class Block;

struct Index {
  unsigned x = 0;
};

struct DeviceThread {
  Index thread, block, threads, blocks;
  Block* shared = nullptr;
  unsigned polls = 0;
  // What it has read relaxed. The end of a kernel orders it before the next kernel of
  // the stream. So a thread acquires it when it ends, and not before: a kernel that
  // itself needs an acquire has a race without one.
  std::vector<const uint32_t*> read = {};
};

extern thread_local DeviceThread this_thread;

// Waits for all threads of the block, and returns whether one of them gave true.
bool WaitForBlock(bool value);

// Says that the thread reads what others write, perhaps in a loop, and lets them run.
void Polls();
// The same, of what it reads relaxed.
void Polls(const void* address);

// Fails all devices, as a kernel does that reads a misaligned address.
[[noreturn]] void Fault();

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_GRID_H_
