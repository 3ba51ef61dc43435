#include "ffi/backends/host/huge_pages.h"

#include <sys/mman.h>

namespace jaxcomm {

void AdviseHugePages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  // To the edges of the pages: the results of two ranks often lie back to back, and
  // then one huge page serves the end of one and the beginning of the other.
  constexpr uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = begin & ~(kPage - 1);
  const uintptr_t last = (begin + bytes + kPage - 1) & ~(kPage - 1);
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace jaxcomm
