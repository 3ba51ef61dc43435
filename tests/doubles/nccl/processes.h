// Processes of this host, told apart from later ones with the same pid.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_PROCESSES_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_PROCESSES_H_

#include <cstddef>
#include <cstdint>

namespace jaxcomm::fake {

struct Process {
  int32_t pid;
  uint64_t start_time;  // in ticks since boot
};

Process ThisProcess();

// False also for one that ended and whose parent has not looked yet.
bool IsAlive(const Process& process);

// Copies from the memory of another process; 0 or an errno.
int ReadMemory(const Process& process, uint64_t address, void* to, size_t bytes);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_PROCESSES_H_
