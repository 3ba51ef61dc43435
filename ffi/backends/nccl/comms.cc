#include "ffi/backends/nccl/comms.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <utility>

#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/library/device_memory.h"
#include "ffi/os/mutex.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

// How long an abort waits for a thread that launches. One that takes longer is inside
// NCCL, and only the abort lets it go.
constexpr auto kLaunchPatience = std::chrono::milliseconds(100);

void FinalizeAll(const NcclLibrary& library, const std::vector<nccl::Comm>& comms,
                 const std::vector<cuda::Context>& contexts) {
  (void)library.InGroup("ncclCommFinalize", contexts, [&](size_t i) {
    if (comms[i] != nullptr) library.nccl.CommFinalize(comms[i]);
    return OkStatus();
  });
  WaitUntilReady(library, comms, {kGraceSeconds}, "ncclCommFinalize");
}

}  // namespace

Status WaitUntilReady(const NcclLibrary& library, const std::vector<nccl::Comm>& comms,
                      const NcclPatience& patience, const char* what) {
  Status status = OkStatus();
  size_t at = 0;
  RETURN_IF_ERROR(Wait(patience, what, [&] {
    nccl::Result state = nccl::kSuccess;
    for (; at < comms.size() && status.success(); ++at) {
      if (comms[at] == nullptr) continue;
      status = library.Check(library.nccl.CommGetAsyncError(comms[at], &state), what);
      if (state == nccl::kInProgress) return false;
      if (status.success()) status = library.Check(state, what);
    }
    return true;
  }));
  return status;
}

Status WaitForStream(const NcclLibrary& library, cuda::Stream stream,
                     const NcclPatience& patience, const char* what) {
  cuda::Result result = cuda::kNotReady;
  RETURN_IF_ERROR(Wait(patience, what, [&] {
    result = library.cuda.StreamQuery(stream);
    return result != cuda::kNotReady;
  }));
  return library.Check(result, what);
}

void EndComms(const NcclLibrary& library, const std::vector<nccl::Comm>& comms,
              const std::vector<cuda::Context>& contexts, bool abort) {
  // NCCL would ask the driver, which answers nothing any more.
  if (DevicesAreStopped()) return;
  if (std::all_of(comms.begin(), comms.end(),
                  [](nccl::Comm comm) { return comm == nullptr; })) {
    return;
  }
  // NCCL waits for the other ranks here, which may never come, or for the device: on a
  // thread that can be left alone. What was left is not destroyed any more. Nothing
  // ends on devices that are stopped.
  const auto is_left = std::make_shared<std::atomic<bool>>(false);
  const auto ended = std::make_shared<std::promise<void>>();
  std::future<void> end = ended->get_future();
  const auto run = [&library, comms, contexts, abort, is_left, ended] {
    if (!abort) FinalizeAll(library, comms, contexts);
    for (size_t i = 0; i < comms.size(); ++i) {
      if (DevicesAreStopped() || (*is_left && !abort)) break;
      if (comms[i] == nullptr) continue;
      const CurrentContext current(library.cuda, contexts[i]);
      abort ? library.nccl.CommAbort(comms[i]) : library.nccl.CommDestroy(comms[i]);
    }
    ended->set_value();
  };
  if (StartDetached(run).failure()) return;  // they stay until the process ends
  end.wait_for(std::chrono::duration<double>(kGraceSeconds));
  *is_left = true;
}

Comms::Comms(const NcclLibrary& library, const Health& health, const LocalRanks& ranks,
             NcclPatience patience)
    : library_(library),
      health_(health),
      ranks_(ranks),
      patience_(health.WhileWell(std::move(patience))),
      items_(ranks.size()) {}

Status Comms::Prepare() {
  for (const auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->facts.context);
    RETURN_IF_ERROR(library_.Try(library_.cuda.MemAlloc,
                                 &items_[rank->facts.place].scratch, kScratchBytes));
  }
  return OkStatus();
}

void Comms::Release() {
  for (const auto& rank : ranks_) {
    const cuda::Pointer scratch = items_[rank->facts.place].scratch;
    CurrentContext current(library_.cuda, rank->facts.context);
    if (scratch != 0) library_.cuda.MemFree(scratch);
  }
}

std::vector<cuda::Context> Comms::contexts() const {
  std::vector<cuda::Context> contexts;
  for (const auto& rank : ranks_) contexts.push_back(rank->facts.context);
  return contexts;
}

void Comms::Set(const std::vector<nccl::Comm>& comms) {
  for (size_t i = 0; i < comms.size(); ++i) items_[i].comm = comms[i];
}

Status Comms::InGroup(const char* what,
                      const std::function<nccl::Result(LocalRank&, nccl::Comm)>& call) {
  std::vector<nccl::Comm> comms;
  for (const auto& rank : ranks_) comms.push_back(comm(rank->facts.place));
  RETURN_IF_ERROR(library_.InGroup(what, contexts(), [&](size_t i) {
    if (comms[i] == nullptr) return OkStatus();
    return library_.Check(call(*ranks_[i], comms[i]), what);
  }));
  return WaitUntilReady(library_, comms, patience_, what);
}

Status Comms::Finish(nccl::Result result, nccl::Comm comm, const char* what,
                     double seconds) const {
  if (result != nccl::kInProgress) return library_.Check(result, what);
  return WaitUntilReady(library_, {comm}, health_.WhileWell({seconds}), what);
}

Status Comms::WaitForStreams() {
  for (const auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->facts.context);
    RETURN_IF_ERROR(
        WaitForStream(library_, rank->split_phase.stream(), patience_, "first use"));
  }
  return OkStatus();
}

Status Comms::Connect() {
  const nccl::Api& api = library_.nccl;
  RETURN_IF_ERROR(InGroup("first use", [&](LocalRank& rank, nccl::Comm comm) {
    const RankFacts& facts = rank.facts;
    const cuda::Stream stream = rank.split_phase.stream();
    void* const bytes = reinterpret_cast<void*>(scratch(facts.place));
    void* const more = reinterpret_cast<void*>(scratch(facts.place) + 64);
    const int next = (facts.rank + 1) % facts.size;
    const int last = (facts.rank + facts.size - 1) % facts.size;
    api.Send(bytes, 4, nccl::Type::kInt8, next, comm, stream);
    return api.Recv(more, 4, nccl::Type::kInt8, last, comm, stream);
  }));
  RETURN_IF_ERROR(InGroup("first use", [&](LocalRank& rank, nccl::Comm comm) {
    void* const bytes = reinterpret_cast<void*>(scratch(rank.facts.place));
    return api.AllReduce(bytes, bytes, 1, nccl::Type::kFloat32, nccl::RedOp::kSum, comm,
                         rank.split_phase.stream());
  }));
  return WaitForStreams();
}

Status Comms::AsyncError(LocalRank& rank) {
  if (!IsGroupGiven(ranks_, rank.facts.group)) return OkStatus();
  if (!rank.queue.launching.try_lock()) return OkStatus();
  const MutexLock lock(rank.queue.launching, std::adopt_lock);
  const nccl::Comm own = comm(rank.facts.place);
  nccl::Result state = nccl::kSuccess;
  if (own == nullptr ||
      library_.nccl.CommGetAsyncError(own, &state) != nccl::kSuccess) {
    return OkStatus();
  }
  return library_.Check(state, "NCCL");
}

void Comms::Abort(LocalRank& rank) {
  const bool is_alone = rank.queue.launching.try_lock_for(kLaunchPatience);
  const nccl::Comm own = items_[rank.facts.place].comm.exchange(nullptr);
  if (is_alone) rank.queue.launching.unlock();
  if (own == nullptr) return;
  const CurrentContext current(library_.cuda, rank.facts.context);
  library_.nccl.CommAbort(own);
}

void Comms::End(bool by_force) {
  std::vector<nccl::Comm> comms;
  for (Item& item : items_) comms.push_back(item.comm.exchange(nullptr));
  EndComms(library_, comms, contexts(), by_force);
}

size_t Comms::AddBytes(nccl::MemStat stat, int64_t* bytes) const {
  size_t accounted = 0;
  for (const auto& rank : ranks_) {
    // An abort takes the lock as well: the communicator stays while it is held.
    if (!rank->queue.launching.try_lock()) continue;
    const MutexLock lock(rank->queue.launching, std::adopt_lock);
    const CurrentContext current(library_.cuda, rank->facts.context);
    if (AddDeviceBytes(library_, comm(rank->facts.place), stat, bytes)) {
      ++accounted;
    }
  }
  return accounted;
}

}  // namespace jaxcomm
