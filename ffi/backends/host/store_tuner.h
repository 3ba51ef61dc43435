// Whether what one process writes and another reads goes through their caches.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_STORE_TUNER_H_
#define JAXCOMM_FFI_BACKENDS_HOST_STORE_TUNER_H_

#include <atomic>
#include <cstdint>

namespace jaxcomm {

// Cores that share a cache read what the other wrote from there. Between others, of
// another part of the processor or another socket, each line is asked for one at a
// time, and chunks that went to memory arrive sooner: 16 MiB each way between two
// processes took 2.4 ms through a shared cache and 2.8 through memory, but 8 without a
// shared one and 2.1. The system's description of the
// caches does not help: a virtual machine's cores move while it runs. So both ways are
// timed, the slower one seldom. This machine's cores shared a cache at a later test;
// then neither way was measurably faster.
class StoreTuner {
 public:
  enum Step { kWrite, kRead };

  // How the next chunk is to be written.
  bool NextPastCaches();

  // How long a step with a chunk took that was written this way.
  void Took(Step step, bool past_caches, int64_t bytes, uint64_t ticks);

 private:
  float Cost(bool past_caches) const;

  // Ticks per KiB of late, when nothing came in between; 0: not known.
  std::atomic<float> estimates_[2][2] = {};
  std::atomic<uint32_t> chunks_{0};
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_STORE_TUNER_H_
