#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"

namespace jaxcomm {
namespace {

bool IsSent(const Step& step) {
  return step.kind == Step::Kind::kSend || step.kind == Step::Kind::kRecv ||
         step.kind == Step::Kind::kAllToAll || step.kind == Step::Kind::kGather ||
         step.kind == Step::Kind::kScatter;
}

}  // namespace

Status NcclCommunicator::Register(const std::shared_ptr<SymmetricMemory>& memory,
                                  std::string* how) {
  for (auto& rank : ranks_) {
    if (rank->comm == nullptr || memory->data(rank->ordinal) != nullptr) continue;
    return InvalidArgument("device ", rank->device, " of the communicator over axes ",
                           spec().axes, " has no part of this symmetric memory");
  }
  auto told = std::make_shared<std::string>();
  Status status = Patiently("registering symmetric memory", [memory, told](auto& self) {
    return self.RegisterNow(*memory, told.get());
  });
  if (status.failure()) return status;
  memory->AddRegistrar(
      std::static_pointer_cast<NcclCommunicator>(Watched::shared_from_this()));
  *how = std::move(*told);
  return OkStatus();
}

Status NcclCommunicator::RegisterNow(SymmetricMemory& memory, std::string* how) {
  const auto locks = LockAll(/*is_idle=*/false);
  if (failed()) return failure();
  const uint64_t segment = memory.segment();
  std::vector<Rank*> asking;
  std::vector<nccl::Comm> comms;
  for (auto& rank : ranks_) {
    if (rank->comm == nullptr) continue;
    if (rank->windows.Has(segment)) {
      *how = rank->windows.How(segment);
      continue;
    }
    asking.push_back(rank.get());
    comms.push_back(rank->comm);
  }
  if (asking.empty()) return OkStatus();
  Status status = OkStatus();
  library_.nccl.GroupStart();
  for (Rank* rank : asking) {
    CurrentContext current(library_.cuda, rank->context);
    Status begun = rank->windows.Begin(library_, rank->comm, memory.data(rank->ordinal),
                                       memory.bytes(), segment);
    if (status.success()) status = std::move(begun);
  }
  Status ended = library_.Check(library_.nccl.GroupEnd(), "ncclCommWindowRegister");
  if (status.success()) status = std::move(ended);
  if (status.success()) {
    NcclPatience patience = how_.patience;
    patience.interrupted = [this] { return failed(); };
    status = WaitUntilReady(library_, comms, patience, "ncclCommWindowRegister");
  }
  for (Rank* rank : asking) {
    CurrentContext current(library_.cuda, rank->context);
    *how = rank->windows.Finish(library_, rank->comm, segment, status);
  }
  return OkStatus();
}

void NcclCommunicator::Deregister(uint64_t segment) {
  for (auto& rank : ranks_) {
    std::lock_guard<std::timed_mutex> lock(rank->launching);
    if (DevicesAreStopped()) return;
    CurrentContext current(library_.cuda, rank->context);
    rank->windows.Remove(library_, rank->comm, segment);
  }
}

Status NcclCommunicator::CheckPlaces(const Steps& steps, const Call& call,
                                     const Rank& rank) const {
  // No result of a CPU device lies in a pool.
  if (rank.windows.empty() || library_.test_double != nullptr) return OkStatus();
  const auto is_registered = [&](const void* data, const Leaf& leaf) {
    return rank.windows.Cover(data, leaf.bytes());
  };
  for (const Step& step : steps.grouped) {
    if (!IsSent(step)) continue;
    const bool from =
        is_registered(call.operands[step.leaf], call.site->operands()[step.leaf]);
    const bool to =
        is_registered(call.results[step.leaf], call.site->results()[step.leaf]);
    if (from == to) continue;
    return FailedPrecondition(
        "its ", from ? "operand" : "result", " lies in a SymmetricPool and its ",
        from ? "result" : "operand", " does not, between which NCCL cannot send: ",
        from ? "donate an array of the pool for the result, or hand in one that is not "
               "of the pool"
             : "hand in an array of the pool, or donate none of it");
  }
  return OkStatus();
}

bool NcclCommunicator::IsSymmetric(const Call& call, const Rank& rank) const {
  if (rank.windows.empty()) return false;
  const auto all_in = [&](const auto* buffers, const std::vector<Leaf>& leaves) {
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (!rank.windows.Cover(buffers[i], leaves[i].bytes())) return false;
    }
    return true;
  };
  return all_in(call.operands, call.site->operands()) &&
         all_in(call.results, call.site->results());
}

}  // namespace jaxcomm
