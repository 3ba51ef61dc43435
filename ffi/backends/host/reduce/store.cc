#include "ffi/backends/host/reduce/store.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "ffi/os/system_file.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace jaxcomm {
namespace {

// glibc takes allocations from this size on from the system each time and gives them
// back when freed.
constexpr int64_t kAlwaysFreshBytes = 32 << 20;

// It often gives back what was freed from this size on, too. Smaller results are used
// again, their pages already there.
constexpr int64_t kOftenFreshBytes = 8 << 20;

// Rows shorter than this are not worth the wait for the stores at their end.
constexpr int64_t kMinStreamBytes = 4 << 10;

// So many bytes at a time go from the L2 cache to all targets.
constexpr int64_t kPieceBytes = 64 << 10;

// So many bytes at a time are reduced and then written past the caches: they stay in
// the L1 cache beside those they are made of. A psum of 16 MiB between two processes
// took 3.4 ms, the median of 18 runs (3.0 to 6.1), and 4.4 of ten (3.6 to 6.6) with
// 64 KiB, which are written to the L2 cache and read again; 1 to 8 KiB are alike.
constexpr int64_t kReducedBytes = 4 << 10;

// The cache that the cores share. sysconf() tells the sum over all of a processor's
// parts, ten times what a virtual machine with two cores has.
int64_t SharedCacheBytes() {
  static const int64_t bytes = [] {
    const std::string size =
        ReadSystemFile("/sys/devices/system/cpu/cpu0/cache/index3/size");
    const int64_t kib = std::strtoll(size.c_str(), nullptr, 10);
    return (kib > 0 ? kib : int64_t{32} << 10) << 10;
  }();
  return bytes;
}

void CopyPastCaches(void* to, const void* from, int64_t bytes) {
#if defined(__SSE2__)
  constexpr int64_t kLine = 64;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const int64_t head =
      std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(out) & (kLine - 1));
  std::memcpy(out, in, head);
  out += head, in += head, bytes -= head;
  for (; bytes >= kLine; out += kLine, in += kLine, bytes -= kLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(in);
    auto* const target = reinterpret_cast<__m128i*>(out);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(out, in, bytes);
#else
  std::memcpy(to, from, bytes);
#endif
}

// Such stores are not ordered with what is written after them, a flag say.
void Order() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace

Store::Store(int64_t touched, int64_t result_bytes)
    : past_caches_(touched >= 2 * SharedCacheBytes() &&
                   result_bytes < kAlwaysFreshBytes) {}

void Store::Copy(void* const* targets, int num_targets, const void* source,
                 int64_t bytes) const {
  if (!past_caches_ || bytes < kMinStreamBytes) {
    const int64_t piece = num_targets > 1 ? kPieceBytes : bytes;
    for (int64_t at = 0; at < bytes; at += piece) {
      for (int i = 0; i < num_targets; ++i) {
        std::memcpy(static_cast<char*>(targets[i]) + at,
                    static_cast<const char*>(source) + at, std::min(piece, bytes - at));
      }
    }
    return;
  }
  for (int i = 0; i < num_targets; ++i) CopyPastCaches(targets[i], source, bytes);
  Order();
}

void Store::Reduce(const ReduceKernels& kernels, void** targets, int num_targets,
                   const void** sources, int num_sources, int64_t elements,
                   int64_t width) const {
  if (!past_caches_ || elements * width < kMinStreamBytes) {
    kernels.reduce(targets[0], sources, num_sources, elements);
    Copy(targets + 1, num_targets - 1, targets[0], elements * width);
    return;
  }
  alignas(64) char piece[kReducedBytes];
  const int64_t step = kReducedBytes / width;
  for (int64_t left = elements; left > 0; left -= step) {
    const int64_t count = std::min(left, step);
    kernels.reduce(piece, sources, num_sources, count);
    for (int i = 0; i < num_targets; ++i) {
      CopyPastCaches(targets[i], piece, count * width);
      targets[i] = static_cast<char*>(targets[i]) + count * width;
    }
    for (int i = 0; i < num_sources; ++i) {
      sources[i] = static_cast<const char*>(sources[i]) + count * width;
    }
  }
  Order();
}

void AdviseHugePages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < kOftenFreshBytes) return;
  // To the edges of the pages: the results of two ranks often lie back to back, and
  // then one huge page serves the end of one and the beginning of the other.
  constexpr uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = begin & ~(kPage - 1);
  const uintptr_t last = (begin + bytes + kPage - 1) & ~(kPage - 1);
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
  if (bytes < kAlwaysFreshBytes) return;
  // The ends, which no huge page serves. Linux before 5.14 refuses.
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t head = (first + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t tail = last & ~(kHugePage - 1);
  (void)madvise(reinterpret_cast<void*>(first), head - first, MADV_POPULATE_WRITE);
  (void)madvise(reinterpret_cast<void*>(tail), last - tail, MADV_POPULATE_WRITE);
#endif
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace jaxcomm
