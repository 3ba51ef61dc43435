#include "ffi/backends/nccl/one_shot.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>

namespace jaxcomm {
namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kWordBytes = 4;
// More of them are a group of NCCL's.
constexpr size_t kMostSteps = 4;
constexpr uint32_t kLastFlag = 0xffffffff;

// A sum as the kernels know it.
struct Sum {
  OneShotWord word;
  uint32_t words;
  float factor = 1;
};

std::optional<Sum> SumOf(const Step& step, int size) {
  if (step.kind != Step::Kind::kAllReduce || step.count == 0 ||
      step.count > 2 * OneShotArguments::Capacity(size) ||
      step.from % kWordBytes != 0 || step.to % kWordBytes != 0) {
    return std::nullopt;
  }
  const auto count = static_cast<uint32_t>(step.count);
  const bool is_mean = step.op == nccl::RedOp::kAvg;
  if (is_mean ? step.type != nccl::Type::kFloat32 : step.op != nccl::RedOp::kSum) {
    return std::nullopt;
  }
  std::optional<Sum> sum;
  switch (step.type) {
    case nccl::Type::kInt32:
    case nccl::Type::kUint32:
      sum = {OneShotWord::kInt32, count};
      break;
    case nccl::Type::kFloat32:
      sum = {OneShotWord::kFloat32, count, is_mean ? 1 / static_cast<float>(size) : 1};
      break;
    case nccl::Type::kFloat16:
    case nccl::Type::kBfloat16:
      if (count % 2 != 0) return std::nullopt;
      sum = {step.type == nccl::Type::kFloat16 ? OneShotWord::kFloat16
                                               : OneShotWord::kBfloat16,
             count / 2};
      break;
    default:
      return std::nullopt;
  }
  if (sum->words > OneShotArguments::Capacity(size)) return std::nullopt;
  return sum;
}

}  // namespace

struct OneShot::Kernels {
  explicit Kernels(const NcclLibrary& of, cuda::Context in)
      : library(of), context(in) {}
  ~Kernels() {
    CurrentContext current(library.cuda, context);
    if (module != nullptr) library.cuda.ModuleUnload(module);
  }

  Status Load() {
    CurrentContext current(library.cuda, context);
    static const std::string& text = *new std::string(OneShotPtx());
    if (Status status = library.Check(
            library.cuda.ModuleLoadData(&module, text.c_str()), "cuModuleLoadData");
        status.failure()) {
      module = nullptr;
      return status;
    }
    for (int word = 0; word < kNumOneShotWords; ++word) {
      if (Status status =
              library.Check(library.cuda.ModuleGetFunction(
                                &sum[word], module,
                                OneShotKernelName(static_cast<OneShotWord>(word))),
                            "cuModuleGetFunction");
          status.failure()) {
        return status;
      }
    }
    return OkStatus();
  }

  const NcclLibrary& library;
  const cuda::Context context;
  cuda::Module module = nullptr;
  cuda::Function sum[kNumOneShotWords] = {};
};

std::shared_ptr<const OneShot::Kernels> OneShot::KernelsOf(const NcclLibrary& library,
                                                           cuda::Context context) {
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::map<cuda::Context, std::weak_ptr<const Kernels>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<const Kernels> found = known[context].lock();
  if (found != nullptr) return found;
  auto made = std::make_shared<Kernels>(library, context);
  if (made->Load().failure()) return nullptr;
  known[context] = made;
  return made;
}

Status OneShot::Create(const NcclLibrary& library,
                       const std::vector<PeerMember>& members,
                       const std::vector<cuda::Stream>& streams,
                       std::unique_ptr<OneShot>* one_shot, uint32_t flag) {
  for (const PeerMember& member : members) {
    if (member.size > OneShotArguments::kMostRanks) return OkStatus();
  }
  if (!CanReachPeers(library, members)) return OkStatus();
  std::unique_ptr<OneShot> made(new OneShot(library));
  for (const PeerMember& member : members) {
    auto kernels = KernelsOf(library, member.context);
    if (kernels == nullptr) return OkStatus();
    Lane& lane = made->lanes_.emplace_back();
    lane.member = member;
    lane.kernels = std::move(kernels);
  }
  if (Status status = made->Allocate(streams, flag); status.failure()) return status;
  *one_shot = std::move(made);
  return OkStatus();
}

Status OneShot::Allocate(const std::vector<cuda::Stream>& streams, uint32_t flag) {
  for (Lane& lane : lanes_) {
    CurrentContext current(library_.cuda, lane.member.context);
    Status status = OkStatus();
    if (stop_ == nullptr) {
      void* memory = nullptr;
      status = library_.Check(library_.cuda.MemAllocHost(&memory, sizeof(*stop_)),
                              "cuMemAllocHost");
      if (status.failure()) return status;
      stop_ = static_cast<uint32_t*>(memory);
      *stop_ = 0;
    }
    status = library_.Check(
        library_.cuda.MemAlloc(&lane.inbox, OneShotArguments::kInboxBytes),
        "cuMemAlloc");
    if (status.failure()) return status;
    status =
        library_.Check(library_.cuda.EventCreate(&lane.last, cuda::kEventDisableTiming),
                       "cuEventCreate");
    if (status.failure()) return status;
  }
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    lane.arguments.stop = reinterpret_cast<uint64_t>(stop_);
    lane.arguments.rank = static_cast<uint32_t>(lane.member.rank);
    lane.arguments.ranks = static_cast<uint32_t>(lane.member.size);
    lane.arguments.capacity = OneShotArguments::Capacity(lane.member.size);
    lane.arguments.flag = flag;
    for (const Lane& peer : lanes_) {
      if (peer.member.group != lane.member.group) continue;
      lane.arguments.inboxes[peer.member.rank] = peer.inbox;
    }
    // Flags count from 1.
    CurrentContext current(library_.cuda, lane.member.context);
    if (Status status = library_.Check(
            library_.cuda.MemsetD8Async(lane.inbox, 0, OneShotArguments::kInboxBytes,
                                        streams[i]),
            "cuMemsetD8Async");
        status.failure()) {
      return status;
    }
  }
  return OkStatus();
}

OneShot::~OneShot() {
  for (Lane& lane : lanes_) {
    CurrentContext current(library_.cuda, lane.member.context);
    if (lane.last != nullptr) library_.cuda.EventDestroy(lane.last);
    if (lane.inbox != 0) library_.cuda.MemFree(lane.inbox);
  }
  if (stop_ == nullptr) return;
  CurrentContext current(library_.cuda, lanes_[0].member.context);
  library_.cuda.MemFreeHost(stop_);
}

bool OneShot::Takes(const Steps& steps, size_t member) const {
  const Lane& lane = lanes_[member];
  if (lane.member.size < 2 || steps.grouped.empty() || !steps.local.empty() ||
      steps.grouped.size() > kMostSteps ||
      lane.arguments.flag > kLastFlag - kMostSteps) {
    return false;
  }
  return std::all_of(steps.grouped.begin(), steps.grouped.end(), [&](const Step& step) {
    return SumOf(step, lane.member.size).has_value();
  });
}

Status OneShot::Launch(const Steps& steps, const Call& call, size_t member,
                       cuda::Stream stream) {
  Lane& lane = lanes_[member];
  if (lane.stream != stream && lane.stream != nullptr) {
    if (Status status = library_.Check(
            library_.cuda.StreamWaitEvent(stream, lane.last, 0), "cuStreamWaitEvent");
        status.failure()) {
      return status;
    }
  }
  for (const Step& step : steps.grouped) {
    const std::optional<Sum> sum = SumOf(step, lane.member.size);
    OneShotArguments& arguments = lane.arguments;
    arguments.operand =
        reinterpret_cast<uint64_t>(call.operands[step.leaf]) + step.from;
    arguments.result = reinterpret_cast<uint64_t>(call.results[step.leaf]) + step.to;
    arguments.words = sum->words;
    arguments.factor = sum->factor;
    ++arguments.flag;
    void* parameters[] = {&arguments};
    const unsigned blocks = (sum->words + kThreads - 1) / kThreads;
    const unsigned threads = std::min<unsigned>(kThreads, (sum->words + 31) / 32 * 32);
    if (Status status =
            library_.Check(library_.cuda.LaunchKernel(
                               lane.kernels->sum[static_cast<int>(sum->word)], blocks,
                               1, 1, threads, 1, 1, 0, stream, parameters, nullptr),
                           "cuLaunchKernel");
        status.failure()) {
      return status;
    }
  }
  lane.stream = stream;
  return library_.Check(library_.cuda.EventRecord(lane.last, stream), "cuEventRecord");
}

void OneShot::Stop() { __atomic_store_n(stop_, 1u, __ATOMIC_RELEASE); }

}  // namespace jaxcomm
