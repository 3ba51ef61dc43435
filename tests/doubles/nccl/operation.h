// One operation of one rank, as it was called.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_OPERATION_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_OPERATION_H_

#include <cstddef>
#include <string>

#include "ffi/backends/nccl/nccl_api.h"

namespace jaxcomm::fake {

enum Kind : int {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAlltoAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
  // These meet on the host:
  kSplit,
  kWindowRegister,
};

// As the function is called: "ncclAllReduce".
std::string Name(int kind);

inline bool IsReduction(Kind kind) {
  return kind == kAllReduce || kind == kReduce || kind == kReduceScatter;
}

inline bool HasRoot(Kind kind) {
  return kind == kReduce || kind == kBroadcast || kind == kGather || kind == kScatter;
}

inline constexpr int kNobody = -1;

struct Operation {
  Kind kind;
  const void* send;
  void* recv;
  size_t count;
  nccl::Type type;
  nccl::RedOp op = nccl::RedOp::kSum;  // of reductions
  int peer = kNobody;                  // or root
  bool hangs = false;                  // a test wants it never to complete
};

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_OPERATION_H_
