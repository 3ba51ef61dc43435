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
  uint32_t stop = 0;
  // A line for each: devices write to it.
  struct alignas(64) Member {
    OneShotProgress progress;
  } members[];
};

Status OneShot::LoadKernels(RankState& state) {
  ASSIGN_OR_RETURN(auto kernels, DeviceKernels::Load(library_, state.facts.context));
  for (int word = 0; word < kNumOneShotWords; ++word) {
    ASSIGN_OR_RETURN(state.sums[word], kernels->Find(kSumKernels[word]));
  }
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
  made->FindInboxes();
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
  if (state.facts.size < 2) return OkStatus();
  if (Status able = LoadKernels(state); able.failure()) {
    // Not an error: the other processes would wait for this one. They learn of it.
    inboxes_->SetUnable(state.index, able);
    return OkStatus();
  }
  // Flags count from 1.
  const size_t bytes = OneShotArguments::InboxBytes(state.facts.size);
  return inboxes_->Take(state.index, bytes, /*zeroed=*/bytes);
}

Status OneShot::Share(NcclParts& parts) {
  RETURN_IF_ERROR(inboxes_->Share(parts));
  FindInboxes();
  return OkStatus();
}

void OneShot::FindInboxes() {
  for (RankState& state : ranks_) {
    if (!takes_part(state.index)) continue;
    OneShotArguments& arguments = state.arguments;
    arguments.stop = reinterpret_cast<uint64_t>(&shared_->stop);
    arguments.progress = reinterpret_cast<uint64_t>(state.progress);
    arguments.rank = static_cast<uint32_t>(state.facts.rank);
    arguments.ranks = static_cast<uint32_t>(state.facts.size);
    arguments.capacity = OneShotArguments::Capacity(state.facts.size);
    for (int rank = 0; rank < state.facts.size; ++rank) {
      arguments.inboxes[rank] = inboxes_->of(state.index, rank);
    }
  }
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
