#include "ffi/backends/nccl/engines/one_shot.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "ffi/backends/nccl/engines/peer_memory.h"
#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/library/primary_contexts.h"
#include "ffi/base/keep_forever.h"

namespace jaxcomm {
namespace {

constexpr int64_t kWordBytes = 4;
constexpr unsigned kThreads = 256;
// A block that waits keeps its place on the GPU. If lanes filled GPUs with it in
// different orders, none would come to its end: with so many, four to a multiprocessor,
// a GPU of 40 has room for two lanes.
constexpr unsigned kMostBlocks = OneShotProgress::kEnds;
// How long the end waits for sums that streams have.
constexpr double kGraceSeconds = 10;

}  // namespace

std::optional<OneShotSum> SumOf(const Step& step, int size) {
  if (step.kind != Step::Kind::kAllReduce || step.count == 0 ||
      step.from % kWordBytes != 0 || step.to % kWordBytes != 0) {
    return std::nullopt;
  }
  const auto count = static_cast<int64_t>(step.count);
  const bool is_mean = step.op == nccl::RedOp::kAvg;
  if (is_mean ? step.type != nccl::Type::kFloat32 : step.op != nccl::RedOp::kSum) {
    return std::nullopt;
  }
  switch (step.type) {
    case nccl::Type::kInt32:
    case nccl::Type::kUint32:
      return OneShotSum{OneShotWord::kInt32, count};
    case nccl::Type::kFloat32:
      return OneShotSum{OneShotWord::kFloat32, count,
                        is_mean ? 1 / static_cast<float>(size) : 1};
    case nccl::Type::kFloat16:
    case nccl::Type::kBfloat16:
      if (count % 2 != 0) return std::nullopt;
      return OneShotSum{step.type == nccl::Type::kFloat16 ? OneShotWord::kFloat16
                                                          : OneShotWord::kBfloat16,
                        count / 2};
    default:
      return std::nullopt;
  }
}

struct OneShot::Shared {
  static constexpr int kInfos = 1 + OneShotArguments::kMostRanks;

  struct Member {
    alignas(64) OneShotProgress progress;
    PeerInfo infos[kInfos];  // its own, then the received ones
  };

  uint32_t stop = 0;
  Member members[];
};

Status OneShot::LoadKernels(RankState& state) {
  ASSIGN_OR_RETURN(auto kernels, DeviceKernels::Load(library_, state.facts.context));
  for (int word = 0; word < kNumOneShotWords; ++word) {
    ASSIGN_OR_RETURN(state.sums[word], kernels->Find(kSumKernels[word]));
  }
  state.kernels = std::move(kernels);
  return OkStatus();
}

void OneShot::CannotTakePart(std::string reason) {
  if (reason_.empty()) reason_ = std::move(reason);
}

ErrorOr<std::unique_ptr<OneShot>> OneShot::Create(
    const NcclLibrary& library, const std::vector<RankFacts>& members,
    const std::vector<cuda::Stream>& streams, uint32_t flag) {
  std::unique_ptr<OneShot> made(new OneShot(library));
  const bool reach_each_other = CanReachPeers(library, members);
  for (const RankFacts& member : members) {
    RankState& state = made->ranks_.emplace_back();
    state.facts = member;
    state.index = made->ranks_.size() - 1;
    state.flag = flag;
    if (member.size < 2) continue;
    if (member.size > OneShotArguments::kMostRanks) {
      made->CannotTakePart(
          StrCat("more than ", OneShotArguments::kMostRanks, " ranks"));
    } else if (!reach_each_other) {
      made->CannotTakePart("a device cannot reach the memory of another");
    } else if (Status status = made->LoadKernels(state); status.failure()) {
      made->CannotTakePart(std::string(status.message()));
    }
  }
  for (RankState& state : made->ranks_) {
    RETURN_IF_ERROR(made->Allocate(state));
  }
  for (size_t i = 0; i < members.size(); ++i) {
    RankState& state = made->ranks_[i];
    if (!made->NeedsPeerInfo(i)) state.takes_part = made->FindInboxes(state);
    if (state.inbox == 0) continue;
    // Flags count from 1.
    CurrentContext current(library.cuda, state.facts.context);
    RETURN_IF_ERROR(library.Try(library.cuda.MemsetD8Async, state.inbox, 0,
                                OneShotArguments::InboxBytes(state.facts.size),
                                streams[i]));
  }
  return made;
}

Status OneShot::Allocate(RankState& state) {
  CurrentContext current(library_.cuda, state.facts.context);
  if (shared_ == nullptr) {
    const size_t bytes = sizeof(Shared) + ranks_.size() * sizeof(Shared::Member);
    void* memory = nullptr;
    RETURN_IF_ERROR(library_.Try(library_.cuda.MemAllocHost, &memory, bytes));
    shared_ = static_cast<Shared*>(memory);
    std::memset(memory, 0, bytes);
  }
  state.infos = shared_->members[state.index].infos;
  state.progress = &shared_->members[state.index].progress;
  state.infos[0].host = ThisHost();
  state.infos[0].process = ThisProcess();
  if (state.kernels == nullptr) return OkStatus();
  Status status =
      library_.Try(library_.cuda.EventCreate, &state.last, cuda::kEventDisableTiming);
  if (status.success()) {
    status = library_.Try(library_.cuda.MemAlloc, &state.inbox,
                          OneShotArguments::InboxBytes(state.facts.size));
  }
  if (status.failure()) {
    // Not an error: the other processes would wait for this one. They learn of it.
    CannotTakePart(std::string(status.message()));
    state.kernels = nullptr;
    return OkStatus();
  }
  if (NeedsPeerInfo(state.index)) {
    const Status shown =
        library_.Try(library_.cuda.IpcGetMemHandle, &state.infos[0].inbox, state.inbox);
    state.infos[0].is_able = shown.success();
    if (shown.failure()) CannotTakePart(std::string(shown.message()));
  }
  state.arguments.stop = reinterpret_cast<uint64_t>(&shared_->stop);
  state.arguments.progress = reinterpret_cast<uint64_t>(state.progress);
  state.arguments.rank = static_cast<uint32_t>(state.facts.rank);
  state.arguments.ranks = static_cast<uint32_t>(state.facts.size);
  state.arguments.capacity = OneShotArguments::Capacity(state.facts.size);
  return OkStatus();
}

bool OneShot::MayRun(const RankState& state) const {
  if (state.launched == 0 || IsDone(*state.progress, state.launched)) return false;
  // Any event says whether the device has failed.
  const cuda::Result result = library_.cuda.EventQuery(state.last);
  return result == cuda::kSuccess || result == cuda::kNotReady;
}

Status OneShot::WaitForLast(RankState& state, cuda::Stream stream) {
  state.changes_streams = true;
  if (!MayRun(state)) return OkStatus();
  if (!state.is_recorded) {
    // An event of a graph would have `stream` become part of it.
    cuda::CaptureStatus capture = cuda::kCaptureNone;
    RETURN_IF_ERROR(
        library_.Try(library_.cuda.StreamIsCapturing, state.stream, &capture));
    if (capture != cuda::kCaptureNone) {
      return Status(ErrorCode::kInternal,
                    "the stream of the sum before is being captured");
    }
    RETURN_IF_ERROR(library_.Try(library_.cuda.EventRecord, state.last, state.stream));
    state.is_recorded = true;
  }
  return library_.Try(library_.cuda.StreamWaitEvent, stream, state.last, 0);
}

bool OneShot::IsIdleSoon() {
  const auto is_idle = [this](const RankState& state) {
    CurrentContext current(library_.cuda, state.facts.context);
    return !MayRun(state);
  };
  return Wait({kGraceSeconds}, "",
              [&] { return std::all_of(ranks_.begin(), ranks_.end(), is_idle); })
      .success();
}

void OneShot::Leave() {
  if (is_idle_.has_value()) return;
  if (DevicesAreStopped()) {
    // Kernels that wait stay: they would leave without a sum before the device stops.
    is_idle_ = false;
    return;
  }
  // Where it was stopped others may have sums that are yet to write here.
  keeps_inboxes_ = is_stopped_;
  Stop();
  // A sum that is yet to run would write to what is closed, and freed.
  is_idle_ = IsIdleSoon();
  if (!*is_idle_) return;
  for (RankState& state : ranks_) {
    CurrentContext current(library_.cuda, state.facts.context);
    for (cuda::Pointer opened : state.opened) library_.cuda.IpcCloseMemHandle(opened);
  }
}

OneShot::~OneShot() {
  Leave();
  if (!*is_idle_) {
    KeepForever(std::move(ranks_));
    return;
  }
  for (RankState& state : ranks_) {
    CurrentContext current(library_.cuda, state.facts.context);
    if (state.last != nullptr) library_.cuda.EventDestroy(state.last);
    const bool others_write = keeps_inboxes_ && !state.opened.empty();
    if (state.inbox != 0 && !others_write) library_.cuda.MemFree(state.inbox);
  }
  if (shared_ == nullptr) return;
  CurrentContext current(library_.cuda, ranks_[0].facts.context);
  library_.cuda.MemFreeHost(shared_);
}

int64_t OneShot::device_bytes() const {
  int64_t bytes = 0;
  for (const RankState& state : ranks_) {
    if (state.inbox != 0)
      bytes += static_cast<int64_t>(OneShotArguments::InboxBytes(state.facts.size));
  }
  return bytes;
}

bool OneShot::NeedsPeerInfo(size_t member) const {
  const RankFacts& one = ranks_[member].facts;
  const auto here = std::count_if(
      ranks_.begin(), ranks_.end(),
      [&](const RankState& state) { return state.facts.group == one.group; });
  return here < one.size && one.size <= OneShotArguments::kMostRanks;
}

bool OneShot::FindInboxes(RankState& state) {
  if (state.kernels == nullptr) return false;
  for (const RankState& peer : ranks_) {
    if (peer.facts.group != state.facts.group) continue;
    state.arguments.inboxes[peer.facts.rank] = peer.inbox;
  }
  for (int rank = 0; rank < state.facts.size; ++rank) {
    if (state.arguments.inboxes[rank] == 0) return false;
  }
  return true;
}

void OneShot::Open(size_t member) {
  RankState& state = ranks_[member];
  CurrentContext current(library_.cuda, state.facts.context);
  PeerInfo& own = state.infos[0];
  own.is_able = AreAble(state);
  for (int rank = 0; rank < state.facts.size && own.is_able != 0; ++rank) {
    const PeerInfo& info = received_infos(member)[rank];
    if (info.process == own.process) continue;
    cuda::Pointer inbox = 0;
    const Status opened = library_.Try(library_.cuda.IpcOpenMemHandle, &inbox,
                                       info.inbox, cuda::kIpcEnablePeerAccess);
    own.is_able = opened.success();
    if (opened.failure()) {
      CannotTakePart(std::string(opened.message()));
      return;
    }
    state.opened.push_back(inbox);
    state.arguments.inboxes[rank] = inbox;
  }
  if (own.is_able != 0 && !FindInboxes(state)) own.is_able = 0;
}

void OneShot::Agree(size_t member) {
  ranks_[member].takes_part = AreAble(ranks_[member]);
}

bool OneShot::AreAble(const RankState& state) {
  for (int rank = 0; rank < state.facts.size; ++rank) {
    const PeerInfo& info = state.infos[1 + rank];
    if (info.host != state.infos[0].host) {
      CannotTakePart(StrCat("rank ", rank, " is on another host"));
      return false;
    }
    if (info.is_able == 0) {
      CannotTakePart(StrCat("rank ", rank, " cannot"));
      return false;
    }
  }
  return true;
}

ErrorOr<InFlight::Told> OneShot::Launch(const Steps& steps, const Call& call,
                                        size_t member, cuda::Stream stream) {
  RankState& state = ranks_[member];
  if (state.stream != stream && state.stream != nullptr) {
    RETURN_IF_ERROR(WaitForLast(state, stream));
  }
  const uint32_t first = state.flag + 1;
  for (const Step& step : steps.grouped) {
    const std::optional<OneShotSum> sum = SumOf(step, state.facts.size);
    OneShotArguments& arguments = state.arguments;
    arguments.operand =
        reinterpret_cast<uint64_t>(call.operands[step.leaf]) + step.from;
    arguments.result = reinterpret_cast<uint64_t>(call.results[step.leaf]) + step.to;
    arguments.words = static_cast<uint32_t>(sum->words);
    arguments.factor = sum->factor;
    arguments.flag = ++state.flag;
    void* parameters[] = {&arguments};
    const unsigned blocks =
        std::min<unsigned>(kMostBlocks, (arguments.words + kThreads - 1) / kThreads);
    const unsigned threads =
        std::min<unsigned>(kThreads, (arguments.words + 31) / 32 * 32);
    RETURN_IF_ERROR(library_.Try(library_.cuda.LaunchKernel,
                                 state.sums[static_cast<int>(sum->word)], blocks, 1, 1,
                                 threads, 1, 1, 0, stream, parameters, nullptr));
    state.stream = stream;
    state.launched = arguments.flag;
    state.is_recorded = false;
  }
  if (state.changes_streams) {
    state.is_recorded = library_.cuda.EventRecord(state.last, stream) == cuda::kSuccess;
  }
  return InFlight::Told{state.progress, first, state.launched};
}

void OneShot::Stop() {
  is_stopped_ = true;
  if (shared_ != nullptr) __atomic_store_n(&shared_->stop, 1u, __ATOMIC_RELEASE);
}

}  // namespace jaxcomm
