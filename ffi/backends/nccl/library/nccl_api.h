// The part of NCCL's interface that we use, declared by ourselves: nothing is linked
// and no header of NCCL is needed. Libraries from 2.18 on serve; what came later is
// looked up by name and may be missing. Checked against the headers of 2.27 to 2.32.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_NCCL_API_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_NCCL_API_H_

#include <climits>
#include <cstddef>
#include <cstdint>

#include "ffi/backends/nccl/library/library_api.h"

namespace jaxcomm::nccl {

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum class Type : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

// kAvg multiplies floats by 1 / ranks before it adds them.
enum class RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

using Comm = struct CommHandle*;
using Window = struct WindowHandle*;
using Stream = void*;  // a CUstream, which is a cudaStream_t

struct UniqueId {
  char internal[128];
};

inline constexpr int kUndefined = INT_MIN;
inline constexpr int kNoColor = -1;

// Versions differ in how many of the fields they know; the library looks at `size`, and
// refuses more than it knows.
struct Config {
  size_t size;
  unsigned magic = 0xcafebeef;
  unsigned version;
  // 2.14 to 2.18
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  // 2.27
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
  // 2.28
  int channels_per_net_peer = kUndefined;
  int nvlink_centric_sched = kUndefined;
  // 2.29
  int graph_usage_mode = kUndefined;
  int num_rma_ctx = kUndefined;
  // 2.30
  int max_p2p_peers = kUndefined;
  int graph_stream_ordering = kUndefined;
};

// Of the figures of ncclCommMemStats, in bytes.
enum class MemStat : int { kTotal = 3 };

inline constexpr int kWindowSymmetric = 1;

// name, result, parameters. Those that every library since 2.18 has.
#define JAXCOMM_NCCL_REQUIRED(F)                                                    \
  F(GetVersion, Result, (int*))                                                     \
  F(GetUniqueId, Result, (UniqueId*))                                               \
  F(CommInitRankConfig, Result, (Comm*, int, UniqueId, int, Config*))               \
  F(CommSplit, Result, (Comm, int, int, Comm*, Config*))                            \
  F(CommFinalize, Result, (Comm))                                                   \
  F(CommDestroy, Result, (Comm))                                                    \
  F(CommAbort, Result, (Comm))                                                      \
  F(CommGetAsyncError, Result, (Comm, Result*))                                     \
  F(GetErrorString, const char*, (Result))                                          \
  F(GetLastError, const char*, (Comm))                                              \
  F(GroupStart, Result, ())                                                         \
  F(GroupEnd, Result, ())                                                           \
  F(AllReduce, Result, (const void*, void*, size_t, Type, RedOp, Comm, Stream))     \
  F(Reduce, Result, (const void*, void*, size_t, Type, RedOp, int, Comm, Stream))   \
  F(Broadcast, Result, (const void*, void*, size_t, Type, int, Comm, Stream))       \
  F(AllGather, Result, (const void*, void*, size_t, Type, Comm, Stream))            \
  F(ReduceScatter, Result, (const void*, void*, size_t, Type, RedOp, Comm, Stream)) \
  F(Send, Result, (const void*, size_t, Type, int, Comm, Stream))                   \
  F(Recv, Result, (void*, size_t, Type, int, Comm, Stream))

// Functions that only some versions have.
#define JAXCOMM_NCCL_OPTIONAL(F)                                                       \
  F(MemAlloc, Result, (void**, size_t))                                     /* 2.19 */ \
  F(MemFree, Result, (void*))                                               /* 2.19 */ \
  F(CommRegister, Result, (Comm, void*, size_t, void**))                    /* 2.19 */ \
  F(CommDeregister, Result, (Comm, void*))                                  /* 2.19 */ \
  F(CommWindowRegister, Result, (Comm, void*, size_t, Window*, int))        /* 2.27 */ \
  F(CommWindowDeregister, Result, (Comm, Window))                           /* 2.27 */ \
  F(AlltoAll, Result, (const void*, void*, size_t, Type, Comm, Stream))     /* 2.28 */ \
  F(Gather, Result, (const void*, void*, size_t, Type, int, Comm, Stream))  /* 2.28 */ \
  F(Scatter, Result, (const void*, void*, size_t, Type, int, Comm, Stream)) /* 2.28 */ \
  F(CommMemStats, Result, (Comm, MemStat, uint64_t*))                       /* 2.29.7 */

// The functions of one library, "nccl" left out of their names.
struct Api {
#define JAXCOMM_DECLARE(name, result, parameters) \
  LibraryFunction<result(*) parameters> name{nullptr, "nccl" #name};
  JAXCOMM_NCCL_REQUIRED(JAXCOMM_DECLARE)
  JAXCOMM_NCCL_OPTIONAL(JAXCOMM_DECLARE)
#undef JAXCOMM_DECLARE
};

}  // namespace jaxcomm::nccl

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_NCCL_API_H_
