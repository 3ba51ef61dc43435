#include "ffi/backends/nccl/engines/one_shot.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/backends/nccl/failure/wait.h"
#include "ffi/backends/nccl/library/primary_contexts.h"
#include "ffi/base/keep_forever.h"

namespace jaxcomm {
namespace {

constexpr unsigned kThreads = OneShotArguments::kMostThreads;
constexpr unsigned kQuadBytes = 16;  // what a thread moves at once, staged
// A block that waits keeps its place on the GPU. If lanes filled GPUs with it in
// different orders, none would come to its end: with so many, four to a multiprocessor,
// a GPU of 40 has room for two lanes.
constexpr unsigned kMostBlocks = OneShotProgress::kEnds;

Status Misaligned() {
  return Status(ErrorCode::kInternal,
                "XLA gave a buffer whose address is no multiple of 16");
}

}  // namespace

struct OneShot::Shared {
  uint32_t stop = 0;
  // A line for each: devices write to it.
  struct alignas(64) Member {
    OneShotProgress progress;
  } members[];
};

Status OneShot::LoadKernels(RankState& state) {
  ASSIGN_OR_RETURN(auto kernels, DeviceKernels::Load(library_, state.facts.context));
  ASSIGN_OR_RETURN(state.lines, kernels->Find(kLinesKernel));
  ASSIGN_OR_RETURN(state.staged, kernels->Find(kStagedKernel));
  ASSIGN_OR_RETURN(state.exchange, kernels->Find(kExchangeKernel));
  RETURN_IF_ERROR(
      library_.Try(library_.cuda.EventCreate, &state.last, cuda::kEventDisableTiming));
  state.kernels = std::move(kernels);
  return OkStatus();
}

ErrorOr<std::unique_ptr<OneShot>> OneShot::Create(std::unique_ptr<PeerMemory> inboxes,
                                                  uint32_t flag) {
  std::unique_ptr<OneShot> made(new OneShot(std::move(inboxes)));
  for (size_t place = 0; place < made->inboxes_->size(); ++place) {
    RankState& state = made->ranks_.emplace_back();
    state.facts = made->inboxes_->facts(place);
    state.index = place;
    state.flag = flag;
  }
  for (RankState& state : made->ranks_) RETURN_IF_ERROR(made->Prepare(state));
  made->inboxes_->ShareHere();
  return made;
}

Status OneShot::Prepare(RankState& state) {
  CurrentContext current(library_.cuda, state.facts.context);
  if (shared_ == nullptr) {
    const size_t bytes = sizeof(Shared) + ranks_.size() * sizeof(Shared::Member);
    void* memory = nullptr;
    RETURN_IF_ERROR(library_.Try(library_.cuda.MemAllocHost, &memory, bytes));
    shared_ = static_cast<Shared*>(memory);
    std::memset(memory, 0, bytes);
  }
  state.progress = &shared_->members[state.index].progress;
  state.arguments.stop = reinterpret_cast<uint64_t>(&shared_->stop);
  state.arguments.progress = reinterpret_cast<uint64_t>(state.progress);
  state.arguments.rank = static_cast<uint32_t>(state.facts.rank);
  state.arguments.ranks = static_cast<uint32_t>(state.facts.size);
  if (state.facts.size < 2) return OkStatus();
  if (Status able = LoadKernels(state); able.failure()) {
    // Not an error: the other processes would wait for this one. They learn of it.
    inboxes_->SetUnable(state.index, able);
    return OkStatus();
  }
  return inboxes_->Take(state.index, OneShotMemory::kBytes,
                        /*zeroed=*/OneShotMemory::kZeroedBytes);
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
    inboxes_->Leave(/*is_busy=*/true, /*has_failed=*/true);
    return;
  }
  const bool has_failed = is_stopped_;
  Stop();
  // A sum that is yet to run would write to what others have freed.
  is_idle_ = IsIdleSoon();
  inboxes_->Leave(/*is_busy=*/!*is_idle_, has_failed);
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
  }
  if (shared_ == nullptr) return;
  CurrentContext current(library_.cuda, ranks_[0].facts.context);
  library_.cuda.MemFreeHost(shared_);
}

Status OneShot::LaunchOne(const OneShotWork& work, const Call& call, RankState& state,
                          cuda::Stream stream) {
  const int size = state.facts.size;
  OneShotArguments& arguments = state.arguments;
  arguments.operand = reinterpret_cast<uint64_t>(call.operands[work.leaf]) +
                      static_cast<uint64_t>(work.from);
  arguments.result = reinterpret_cast<uint64_t>(call.results[work.leaf]) +
                     static_cast<uint64_t>(work.to);
  for (int rank = 0; rank < size; ++rank) {
    arguments.inboxes[rank] = inboxes_->of(state.index, rank) +
                              (work.is_staged ? 0 : OneShotMemory::kLinesAt);
  }
  if (work.is_staged && (arguments.operand | arguments.result) % kQuadBytes != 0) {
    return Misaligned();
  }
  arguments.part = work.part;
  arguments.words = work.words;
  arguments.from_stride = work.from_stride;
  arguments.to_stride = work.to_stride;
  arguments.is_shared = work.is_shared;
  arguments.target = work.target;
  arguments.source = work.source;
  arguments.factor = work.factor;
  arguments.word = work.word;
  arguments.capacity =
      work.is_staged ? OneShotMemory::Staged(size) : OneShotMemory::Lines(size);
  arguments.flag = state.flag + 1;
  const unsigned each = kThreads * (work.is_staged ? kQuadBytes / 4 : 1);
  const Grid grid = {std::min<unsigned>(kMostBlocks, (work.part + each - 1) / each),
                     std::min<unsigned>(kThreads, (work.part + 31) / 32 * 32)};
  return Give(state, work.is_staged ? state.staged : state.lines, &arguments, grid,
              /*flags=*/1, stream);
}

Status OneShot::LaunchExchange(const OneShotPlan& plan, const Call& call,
                               RankState& state, cuda::Stream stream) {
  ExchangeArguments arguments;
  arguments.of = state.arguments;
  for (int rank = 0; rank < state.facts.size; ++rank) {
    arguments.of.inboxes[rank] = inboxes_->of(state.index, rank);
  }
  arguments.of.capacity = OneShotMemory::Staged(state.facts.size);
  arguments.of.flag = state.flag + 1;
  arguments.of.word = OneShotWord::kMoved;
  arguments.of.target = arguments.of.source = OneShotArguments::kAll;
  arguments.of.words = 0;
  uint32_t most = 0;
  for (const ExchangedArray& array : plan.exchanged) {
    ExchangeArguments::Array& given = arguments.arrays[arguments.count++];
    given = array;
    given.operand = reinterpret_cast<uint64_t>(call.operands[array.leaf]);
    given.result = reinterpret_cast<uint64_t>(call.results[array.leaf]);
    if ((given.operand | given.result) % kQuadBytes != 0) return Misaligned();
    // What tells this call from others: see SignatureOf.
    for (const uint32_t each : {array.part, array.from.words, array.from.pitch,
                                array.to.words, array.to.pitch}) {
      arguments.of.words = arguments.of.words * 31 + each;
    }
    arguments.of.from_stride = array.from_stride;
    arguments.of.to_stride = array.to_stride;
    most = std::max(most, array.chunk);
  }
  arguments.chunks = plan.chunks;
  constexpr unsigned kEach = ExchangeArguments::kMostThreads * kQuadBytes / 4;
  const Grid grid = {
      std::min<unsigned>(ExchangeArguments::kMostBlocks, (most + kEach - 1) / kEach),
      ExchangeArguments::kMostThreads};
  return Give(state, state.exchange, &arguments, grid, plan.chunks, stream);
}

Status OneShot::Give(RankState& state, cuda::Function kernel, void* arguments,
                     Grid grid, uint32_t flags, cuda::Stream stream) {
  void* parameters[] = {arguments};
  RETURN_IF_ERROR(library_.Try(library_.cuda.LaunchKernel, kernel, grid.blocks, 1, 1,
                               grid.threads, 1, 1, 0, stream, parameters, nullptr));
  state.launched = state.flag += flags;
  state.stream = stream;
  state.is_recorded = false;
  return OkStatus();
}

ErrorOr<InFlight::Told> OneShot::Launch(const OneShotPlan& plan, const Call& call,
                                        size_t member, cuda::Stream stream) {
  RankState& state = ranks_[member];
  if (state.stream != stream && state.stream != nullptr) {
    RETURN_IF_ERROR(WaitForLast(state, stream));
  }
  const uint32_t first = state.flag + 1;
  for (const OneShotWork& work : plan.works) {
    RETURN_IF_ERROR(LaunchOne(work, call, state, stream));
  }
  if (!plan.exchanged.empty()) {
    RETURN_IF_ERROR(LaunchExchange(plan, call, state, stream));
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
