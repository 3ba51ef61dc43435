#include "ffi/backends/nccl/engines/nccl_engine.h"

#include <string_view>
#include <utility>
#include <vector>

namespace jaxcomm {
namespace {

bool IsSent(const Step& step) {
  return step.kind == Step::Kind::kSend || step.kind == Step::Kind::kRecv ||
         step.kind == Step::Kind::kAllToAll || step.kind == Step::Kind::kGather ||
         step.kind == Step::Kind::kScatter;
}

// Of what Windows::Finish() says: "window", "buffer" or "".
std::string_view KindOf(std::string_view how) {
  for (const std::string_view kind : {"window", "buffer: "}) {
    if (how.substr(0, kind.size()) == kind) return kind;
  }
  return "";
}

}  // namespace

Status NcclEngine::Run(const Steps& steps, const Call& call, LocalRank& rank,
                       cuda::Stream stream) {
  const nccl::Comm comm = parts_.comms.comm(rank.facts.place);
  if (comm == nullptr && rank.facts.size > 1) return parts_.health.failure();
  const auto finish = [this, comm, &rank](nccl::Result result, const char* what) {
    Status status =
        parts_.comms.Finish(result, comm, what, parts_.spec.timeout_seconds);
    if (status.success()) rank.queue.MayWait();
    return status;
  };
  if (call.site->kind() == Plan::Kind::kBarrier && rank.facts.size > 1) {
    void* const bytes = reinterpret_cast<void*>(parts_.comms.scratch(rank.facts.place));
    return finish(parts_.library.nccl.AllReduce(bytes, bytes, 1, nccl::Type::kFloat32,
                                                nccl::RedOp::kSum, comm, stream),
                  "ncclAllReduce");
  }
  RETURN_IF_ERROR(CheckPlaces(steps, call, rank));
  return RunSteps(parts_.library, steps, call, comm, stream, finish);
}

Status NcclEngine::Enqueue(const Call& call, const Recipe& recipe, LocalRank& rank,
                           cuda::Stream stream) {
  auto kind = CallCounts::Kind::kOrdinary;
  RETURN_IF_ERROR(rank.queue.Give(call, stream, rank.queue.Record(call), [&] {
    if (IsSymmetricLocked(call, rank)) kind = CallCounts::Kind::kSymmetric;
    return Run(recipe.steps, call, rank, stream);
  }));
  rank.queue.counts().Add(*call.site, kind);
  return OkStatus();
}

std::string NcclEngine::Register(SymmetricMemory& memory) {
  const uint64_t segment = memory.segment();
  std::string how;
  std::vector<LocalRank*> asking;
  std::vector<nccl::Comm> comms;
  std::vector<cuda::Context> contexts;
  for (const auto& rank : parts_.ranks) {
    const nccl::Comm comm = parts_.comms.comm(rank->facts.place);
    if (comm == nullptr) continue;
    if (const auto* known = registered_[rank->facts.place].windows.How(segment)) {
      how = *known;
      continue;
    }
    asking.push_back(rank.get());
    contexts.push_back(rank->facts.context);
    comms.push_back(comm);
  }
  if (asking.empty()) return how;
  Status status = OkStatus();
  Status ended =
      parts_.library.InGroup("ncclCommWindowRegister", contexts, [&](size_t i) {
        const RankFacts& facts = asking[i]->facts;
        Status begun = registered_[facts.place].windows.Begin(
            parts_.library, comms[i], memory.data(facts.ordinal), memory.bytes(),
            segment);
        if (status.success()) status = std::move(begun);
        return OkStatus();  // each rank begins what Finish() ends
      });
  if (status.success()) status = std::move(ended);
  if (status.success()) {
    status = WaitUntilReady(parts_.library, comms, parts_.comms.patience(),
                            "ncclCommWindowRegister");
  }
  std::vector<std::string> hows;
  for (size_t i = 0; i < asking.size(); ++i) {
    Registered& registered = registered_[asking[i]->facts.place];
    CurrentContext current(parts_.library.cuda, asking[i]->facts.context);
    hows.push_back(
        registered.windows.Finish(parts_.library, comms[i], segment, status));
    registered.any = !registered.windows.empty();
  }
  // Ranks choose engines by it, so all have it alike, or none has it.
  for (size_t i = 1; i < asking.size(); ++i) {
    if (KindOf(hows[i]) == KindOf(hows[0])) continue;
    how = StrCat("not alike on all ranks: ", asking[0]->facts.ToString(), ": ", hows[0],
                 "; ", asking[i]->facts.ToString(), ": ", hows[i]);
    for (LocalRank* rank : asking) Remove(*rank, segment);
    return how;
  }
  return hows[0];
}

void NcclEngine::Remove(const LocalRank& rank, uint64_t segment) {
  Registered& registered = registered_[rank.facts.place];
  CurrentContext current(parts_.library.cuda, rank.facts.context);
  registered.windows.Remove(parts_.library, parts_.comms.comm(rank.facts.place),
                            segment);
  registered.any = !registered.windows.empty();
}

void NcclEngine::Deregister(uint64_t segment) {
  for (const auto& rank : parts_.ranks) {
    MutexLock lock(rank->queue.launching);
    if (DevicesAreStopped()) return;
    Remove(*rank, segment);
  }
}

void NcclEngine::ReleaseWindows() {
  for (const auto& rank : parts_.ranks) {
    CurrentContext current(parts_.library.cuda, rank->facts.context);
    registered_[rank->facts.place].windows.RemoveAll(
        parts_.library, parts_.comms.comm(rank->facts.place));
  }
}

Status NcclEngine::CheckPlaces(const Steps& steps, const Call& call,
                               const LocalRank& rank) const {
  const Windows& windows = registered_[rank.facts.place].windows;
  // XLA:CPU, on which tests run this, puts no result into a pool.
  if (windows.empty() || parts_.spec.platform == "cpu") return OkStatus();
  for (const Step& step : steps.grouped) {
    if (!IsSent(step)) continue;
    const int result = step.to_room < 0 ? step.leaf : step.to_room;
    const void* const operand =
        step.from_room < 0 ? call.operands[step.leaf] : call.results[step.from_room];
    const bool from = windows.Cover(operand, call.site->operands()[step.leaf].bytes());
    const bool to =
        windows.Cover(call.results[result], call.site->results()[result].bytes());
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

bool NcclEngine::IsSymmetric(const Call& call, LocalRank& rank) {
  if (!registered_[rank.facts.place].any) return false;
  MutexLock lock(rank.queue.launching);
  return IsSymmetricLocked(call, rank);
}

bool NcclEngine::IsSymmetricLocked(const Call& call, const LocalRank& rank) const {
  const Windows& windows = registered_[rank.facts.place].windows;
  if (windows.empty()) return false;
  const auto all_in = [&](const auto* buffers, const std::vector<Leaf>& leaves) {
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (!windows.Cover(buffers[i], leaves[i].bytes())) return false;
    }
    return true;
  };
  return all_in(call.operands, call.site->operands()) &&
         all_in(call.results, call.site->results());
}

}  // namespace jaxcomm
