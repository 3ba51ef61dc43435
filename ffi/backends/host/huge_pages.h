// Huge pages under results that the allocator takes fresh from the system.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_HUGE_PAGES_H_
#define JAXCOMM_FFI_BACKENDS_HOST_HUGE_PAGES_H_

#include <cstdint>

namespace jaxcomm {

// glibc takes allocations from this size on from the system each time and gives them
// back when freed.
constexpr int64_t kAlwaysFreshBytes = 32 << 20;

// It often gives back what was freed from this size on, too. Smaller results are used
// again, their pages already there.
constexpr int64_t kOftenFreshBytes = 8 << 20;

// Asks for huge pages under a result before it is first written. Touching fresh
// memory 4 KiB at a time costs several times what the copy itself does: 64 MiB took
// 37 ms, with huge pages 10.5. Advice ends with the allocation; where the system
// does not take it, nothing is lost.
void AdviseHugePages(void* data, int64_t bytes);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_HUGE_PAGES_H_
