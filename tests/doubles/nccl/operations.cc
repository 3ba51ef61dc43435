// The operations as they are called: check, note, hand to the group.

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/communicator.h"
#include "tests/doubles/nccl/group.h"
#include "tests/doubles/nccl/operation.h"

namespace jaxcomm::fake {

const char* Name(int kind) {
  static constexpr const char* kNames[] = {
      "ncclAllReduce",     "ncclReduce",   "ncclBroadcast", "ncclAllGather",
      "ncclReduceScatter", "ncclAlltoAll", "ncclGather",    "ncclScatter",
      "ncclSend",          "ncclRecv",     "ncclCommSplit", "ncclCommWindowRegister"};
  return kNames[kind];
}

namespace {

bool NeedsSend(const Operation& operation, int rank) {
  if (operation.kind == kRecv) return false;
  const bool from_root = operation.kind == kBroadcast || operation.kind == kScatter;
  return !from_root || operation.peer == rank;
}

bool NeedsRecv(const Operation& operation, int rank) {
  if (operation.kind == kSend) return false;
  const bool to_root = operation.kind == kReduce || operation.kind == kGather;
  return !to_root || operation.peer == rank;
}

nccl::Result Check(const Operation& operation, const Communicator& communicator) {
  const std::string name(Name(operation.kind));
  if (TypeBytes(operation.type) == 0) {
    return Failure(nccl::kInvalidArgument, name + ": invalid type");
  }
  if (!IsRedOp(operation.op, operation.type)) {
    return Failure(nccl::kInvalidArgument, name + ": invalid reduction");
  }
  const bool one_sided = operation.kind == kSend || operation.kind == kRecv;
  if ((HasRoot(operation.kind) || one_sided) &&
      (operation.peer < 0 || operation.peer >= communicator.size)) {
    return Failure(nccl::kInvalidArgument,
                   name + ": rank " + std::to_string(operation.peer) +
                       " is not one of the " + std::to_string(communicator.size));
  }
  if (operation.count == 0) return nccl::kSuccess;
  if ((NeedsSend(operation, communicator.rank) && operation.send == nullptr) ||
      (NeedsRecv(operation, communicator.rank) && operation.recv == nullptr)) {
    return Failure(nccl::kInvalidArgument, name + ": a buffer is null");
  }
  return nccl::kSuccess;
}

nccl::Result Start(Operation operation, nccl::Comm comm, nccl::Stream stream) {
  const char* const name = Name(operation.kind);
  const Call call({name, Number(comm), Number(stream),
                   static_cast<int64_t>(operation.count),
                   static_cast<int>(operation.type),
                   IsReduction(operation.kind) ? static_cast<int>(operation.op) : -1,
                   operation.peer, CurrentGroup()});
  if (call.refusal() != 0) return Spoil(static_cast<nccl::Result>(call.refusal()));
  operation.hangs = call.hangs();
  operation.connects = call.connects();
  using nccl::kSuccess;
  JAXCOMM_FAKE_FIND(communicator, comm);
  const nccl::Result result = Check(operation, *communicator);
  if (result != nccl::kSuccess) return Spoil(result);
  const std::shared_ptr<Stream> on = FindStream(stream, communicator->device);
  if (on == nullptr || on->device() != communicator->device) {
    return Spoil(CudaFailure(cuda::kInvalidHandle));
  }
  return Submit(communicator, operation, on);
}

}  // namespace
}  // namespace jaxcomm::fake

namespace jaxcomm::nccl {

Result ncclAllReduce(const void* send, void* recv, size_t count, Type type, RedOp op,
                     Comm comm, Stream stream) {
  return fake::Start({fake::kAllReduce, send, recv, count, type, op}, comm, stream);
}

Result ncclReduce(const void* send, void* recv, size_t count, Type type, RedOp op,
                  int root, Comm comm, Stream stream) {
  return fake::Start({fake::kReduce, send, recv, count, type, op, root}, comm, stream);
}

Result ncclBroadcast(const void* send, void* recv, size_t count, Type type, int root,
                     Comm comm, Stream stream) {
  return fake::Start({fake::kBroadcast, send, recv, count, type, {}, root}, comm,
                     stream);
}

Result ncclAllGather(const void* send, void* recv, size_t count, Type type, Comm comm,
                     Stream stream) {
  return fake::Start({fake::kAllGather, send, recv, count, type}, comm, stream);
}

Result ncclReduceScatter(const void* send, void* recv, size_t count, Type type,
                         RedOp op, Comm comm, Stream stream) {
  return fake::Start({fake::kReduceScatter, send, recv, count, type, op}, comm, stream);
}

Result ncclAlltoAll(const void* send, void* recv, size_t count, Type type, Comm comm,
                    Stream stream) {
  return fake::Start({fake::kAlltoAll, send, recv, count, type}, comm, stream);
}

Result ncclGather(const void* send, void* recv, size_t count, Type type, int root,
                  Comm comm, Stream stream) {
  return fake::Start({fake::kGather, send, recv, count, type, {}, root}, comm, stream);
}

Result ncclScatter(const void* send, void* recv, size_t count, Type type, int root,
                   Comm comm, Stream stream) {
  return fake::Start({fake::kScatter, send, recv, count, type, {}, root}, comm, stream);
}

Result ncclSend(const void* send, size_t count, Type type, int peer, Comm comm,
                Stream stream) {
  return fake::Start({fake::kSend, send, nullptr, count, type, {}, peer}, comm, stream);
}

Result ncclRecv(void* recv, size_t count, Type type, int peer, Comm comm,
                Stream stream) {
  return fake::Start({fake::kRecv, nullptr, recv, count, type, {}, peer}, comm, stream);
}

}  // namespace jaxcomm::nccl
