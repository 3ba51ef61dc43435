// How results are written: into the caches or past them, and onto huge pages.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_REDUCE_STORE_H_
#define JAXCOMM_FFI_BACKENDS_HOST_REDUCE_STORE_H_

#include <cstdint>

#include "ffi/backends/host/reduce/reduce.h"
#include "ffi/base/pointer_list.h"

namespace jaxcomm {

// One pointer for each rank of a group.
template <typename T>
using PointerPerRank = PointerList<T, 64>;

class Store {
 public:
  // For a result of `result_bytes` of an operation that reads and writes `touched`
  // bytes in all. Data that will not stay in the caches is written past them: a store
  // into a cache first reads the line that it overwrites. On two cores with 32 MiB of
  // shared cache a copy that touches 256 MiB moves 49 instead of 31 GB/s; one that
  // touches 16 MiB moves 48 instead of 88. Fresh memory comes from the system through
  // the caches and is there already.
  Store(int64_t touched, int64_t result_bytes);

  // For data that is read again at once.
  static Store IntoCaches() { return Store(false); }

  // Each target receives a copy of source.
  void Copy(void* const* targets, int num_targets, const void* source,
            int64_t bytes) const;

  // Each target receives the reduction of the sources, `elements` of `width` bytes.
  // The pointers are moved along on the way.
  void Reduce(const ReduceKernels& kernels, void** targets, int num_targets,
              const void** sources, int num_sources, int64_t elements,
              int64_t width) const;

 private:
  explicit Store(bool past_caches) : past_caches_(past_caches) {}

  bool past_caches_;
};

// Asks for huge pages under a large result before it is first written. Touching fresh
// memory 4 KiB at a time costs several times what the copy itself does: 64 MiB took
// 37 ms, with huge pages 10.5. Advice ends with the allocation; where the system does
// not take it, nothing is lost. The small pages at both ends of a fresh result come in
// one go, not by a fault each: a copy of 32 MiB took 3.4 ms, and 3.0 so.
void AdviseHugePages(void* data, int64_t bytes);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_REDUCE_STORE_H_
