#include "ffi/backends/nccl/one_shot.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "ffi/backends/nccl/device_stop.h"
#include "ffi/backends/nccl/one_shot_sum.h"
#include "ffi/core/hash.h"
#include "ffi/os/system_file.h"

namespace jaxcomm {
namespace {

constexpr unsigned kThreads = 256;
// A block that waits keeps its place on the GPU. If lanes filled GPUs with it in
// different orders, none would come to its end: with so many, four to a multiprocessor,
// a GPU of 40 has room for two lanes.
constexpr unsigned kMostBlocks = 64;
// More of them are a group of NCCL's.
constexpr size_t kMostSteps = 4;
constexpr uint32_t kLastFlag = 0xffffffff;
// What sums that are given to streams are granted at the end.
constexpr auto kGrace = std::chrono::seconds(10);

uint64_t ThisHost() { return Fnv1a(ReadSystemFile("/proc/sys/kernel/random/boot_id")); }

// Process ids are not the same in all containers of a host.
uint64_t ThisProcess() {
  static std::mutex mutex;
  static pid_t pid = 0;
  static uint64_t number = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (pid != getpid()) {
    pid = getpid();
    std::random_device random;
    number = uint64_t{random()} << 32 | random();
  }
  return number;
}

}  // namespace

struct OneShot::Shared {
  static constexpr int kCards = 1 + OneShotArguments::kMostRanks;

  uint32_t stop = 0;
  // Of each member: its own, and those it receives.
  Card cards[];
};

Status OneShot::LoadKernels(Lane& lane) {
  std::shared_ptr<const DeviceKernels> kernels;
  RETURN_IF_ERROR(DeviceKernels::Load(library_, lane.member.context, &kernels));
  for (int word = 0; word < kNumOneShotWords; ++word) {
    RETURN_IF_ERROR(kernels->FindSum(static_cast<OneShotWord>(word), &lane.sums[word]));
  }
  lane.kernels = std::move(kernels);
  return OkStatus();
}

void OneShot::CannotTakePart(std::string reason) {
  if (reason_.empty()) reason_ = std::move(reason);
}

Status OneShot::Create(const NcclLibrary& library,
                       const std::vector<PeerMember>& members,
                       const std::vector<cuda::Stream>& streams,
                       std::unique_ptr<OneShot>* one_shot, uint32_t flag) {
  std::unique_ptr<OneShot> made(new OneShot(library));
  const bool reach_each_other = CanReachPeers(library, members);
  for (const PeerMember& member : members) {
    Lane& lane = made->lanes_.emplace_back();
    lane.member = member;
    lane.arguments.flag = flag;
    if (member.size < 2) continue;
    if (member.size > OneShotArguments::kMostRanks) {
      made->CannotTakePart(
          StrCat("more than ", OneShotArguments::kMostRanks, " ranks"));
    } else if (!reach_each_other) {
      made->CannotTakePart("a device cannot reach the memory of another");
    } else if (Status status = made->LoadKernels(lane); status.failure()) {
      made->CannotTakePart(std::string(status.message()));
    }
  }
  for (Lane& lane : made->lanes_) {
    RETURN_IF_ERROR(made->Allocate(lane));
  }
  for (size_t i = 0; i < members.size(); ++i) {
    Lane& lane = made->lanes_[i];
    if (!made->NeedsCards(i)) lane.takes_part = made->FindInboxes(lane);
    if (lane.inbox == 0) continue;
    // Flags count from 1.
    CurrentContext current(library.cuda, lane.member.context);
    RETURN_IF_ERROR(
        library.Check(library.cuda.MemsetD8Async(
                          lane.inbox, 0, OneShotArguments::kInboxBytes, streams[i]),
                      "cuMemsetD8Async"));
  }
  *one_shot = std::move(made);
  return OkStatus();
}

Status OneShot::Allocate(Lane& lane) {
  CurrentContext current(library_.cuda, lane.member.context);
  if (shared_ == nullptr) {
    const size_t bytes = sizeof(Shared) + lanes_.size() * Shared::kCards * sizeof(Card);
    void* memory = nullptr;
    RETURN_IF_ERROR(
        library_.Check(library_.cuda.MemAllocHost(&memory, bytes), "cuMemAllocHost"));
    shared_ = static_cast<Shared*>(memory);
    std::memset(memory, 0, bytes);
  }
  lane.cards = shared_->cards + (&lane - lanes_.data()) * Shared::kCards;
  lane.cards[0].host = ThisHost();
  lane.cards[0].process = ThisProcess();
  if (lane.kernels == nullptr) return OkStatus();
  Status status =
      library_.Check(library_.cuda.EventCreate(&lane.last, cuda::kEventDisableTiming),
                     "cuEventCreate");
  if (status.success()) {
    status = library_.Check(
        library_.cuda.MemAlloc(&lane.inbox, OneShotArguments::kInboxBytes),
        "cuMemAlloc");
  }
  if (status.failure()) {
    // Other processes are told, who would wait for one that gives up.
    CannotTakePart(std::string(status.message()));
    lane.kernels = nullptr;
    return OkStatus();
  }
  if (NeedsCards(&lane - lanes_.data())) {
    const Status shown =
        library_.Check(library_.cuda.IpcGetMemHandle(&lane.cards[0].inbox, lane.inbox),
                       "cuIpcGetMemHandle");
    lane.cards[0].is_able = shown.success();
    if (shown.failure()) CannotTakePart(std::string(shown.message()));
  }
  lane.arguments.stop = reinterpret_cast<uint64_t>(&shared_->stop);
  lane.arguments.rank = static_cast<uint32_t>(lane.member.rank);
  lane.arguments.ranks = static_cast<uint32_t>(lane.member.size);
  lane.arguments.capacity = OneShotArguments::Capacity(lane.member.size);
  return OkStatus();
}

bool OneShot::IsIdleSoon() {
  const auto end = std::chrono::steady_clock::now() + kGrace;
  for (Lane& lane : lanes_) {
    CurrentContext current(library_.cuda, lane.member.context);
    if (lane.is_lost) return false;
    while (lane.stream != nullptr &&
           library_.cuda.EventQuery(lane.last) == cuda::kNotReady) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return true;
}

void OneShot::Leave() {
  if (is_idle_.has_value()) return;
  if (DevicesAreStopped()) {
    // What waits is not let go: it would leave without a sum before the device stops.
    is_idle_ = false;
    return;
  }
  // Where it was stopped others may have sums that are yet to write here.
  keeps_inboxes_ = is_stopped_;
  Stop();
  // A sum that is yet to run would write to what is closed, and freed.
  is_idle_ = IsIdleSoon();
  if (!*is_idle_) return;
  for (Lane& lane : lanes_) {
    CurrentContext current(library_.cuda, lane.member.context);
    for (cuda::Pointer opened : lane.opened) library_.cuda.IpcCloseMemHandle(opened);
  }
}

OneShot::~OneShot() {
  Leave();
  if (!*is_idle_) {
    new std::vector<Lane>(std::move(lanes_));  // for good
    return;
  }
  for (Lane& lane : lanes_) {
    CurrentContext current(library_.cuda, lane.member.context);
    if (lane.last != nullptr) library_.cuda.EventDestroy(lane.last);
    const bool others_write = keeps_inboxes_ && !lane.opened.empty();
    if (lane.inbox != 0 && !others_write) library_.cuda.MemFree(lane.inbox);
  }
  if (shared_ == nullptr) return;
  CurrentContext current(library_.cuda, lanes_[0].member.context);
  library_.cuda.MemFreeHost(shared_);
}

int64_t OneShot::device_bytes() const {
  int64_t bytes = 0;
  for (const Lane& lane : lanes_) {
    if (lane.inbox != 0) bytes += static_cast<int64_t>(OneShotArguments::kInboxBytes);
  }
  return bytes;
}

bool OneShot::NeedsCards(size_t member) const {
  const PeerMember& one = lanes_[member].member;
  const auto here = std::count_if(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
    return lane.member.group == one.group;
  });
  return here < one.size && one.size <= OneShotArguments::kMostRanks;
}

bool OneShot::FindInboxes(Lane& lane) {
  if (lane.kernels == nullptr) return false;
  for (const Lane& peer : lanes_) {
    if (peer.member.group != lane.member.group) continue;
    lane.arguments.inboxes[peer.member.rank] = peer.inbox;
  }
  for (int rank = 0; rank < lane.member.size; ++rank) {
    if (lane.arguments.inboxes[rank] == 0) return false;
  }
  return true;
}

void OneShot::Open(size_t member) {
  Lane& lane = lanes_[member];
  CurrentContext current(library_.cuda, lane.member.context);
  Card& own = lane.cards[0];
  own.is_able = AreAble(lane);
  for (int rank = 0; rank < lane.member.size && own.is_able != 0; ++rank) {
    const Card& card = received_cards(member)[rank];
    if (card.process == own.process) continue;
    cuda::Pointer inbox = 0;
    const Status opened = library_.Check(
        library_.cuda.IpcOpenMemHandle(&inbox, card.inbox, cuda::kIpcEnablePeerAccess),
        "cuIpcOpenMemHandle");
    own.is_able = opened.success();
    if (opened.failure()) {
      CannotTakePart(std::string(opened.message()));
      return;
    }
    lane.opened.push_back(inbox);
    lane.arguments.inboxes[rank] = inbox;
  }
  if (own.is_able != 0 && !FindInboxes(lane)) own.is_able = 0;
}

void OneShot::Agree(size_t member) {
  lanes_[member].takes_part = AreAble(lanes_[member]);
}

bool OneShot::AreAble(const Lane& lane) {
  for (int rank = 0; rank < lane.member.size; ++rank) {
    const Card& card = lane.cards[1 + rank];
    if (card.host != lane.cards[0].host) {
      CannotTakePart(StrCat("rank ", rank, " is on another host"));
      return false;
    }
    if (card.is_able == 0) {
      CannotTakePart(StrCat("rank ", rank, " cannot"));
      return false;
    }
  }
  return true;
}

bool OneShot::Takes(const Steps& steps, size_t member) const {
  const Lane& lane = lanes_[member];
  if (!lane.takes_part || steps.grouped.empty() || !steps.local.empty() ||
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
    RETURN_IF_ERROR(library_.Check(library_.cuda.StreamWaitEvent(stream, lane.last, 0),
                                   "cuStreamWaitEvent"));
  }
  Status status = OkStatus();
  for (const Step& step : steps.grouped) {
    if (status.failure()) break;
    const std::optional<OneShotSum> sum = SumOf(step, lane.member.size);
    OneShotArguments& arguments = lane.arguments;
    arguments.operand =
        reinterpret_cast<uint64_t>(call.operands[step.leaf]) + step.from;
    arguments.result = reinterpret_cast<uint64_t>(call.results[step.leaf]) + step.to;
    arguments.words = sum->words;
    arguments.factor = sum->factor;
    ++arguments.flag;
    void* parameters[] = {&arguments};
    const unsigned blocks =
        std::min<unsigned>(kMostBlocks, (sum->words + kThreads - 1) / kThreads);
    const unsigned threads = std::min<unsigned>(kThreads, (sum->words + 31) / 32 * 32);
    status = library_.Check(
        library_.cuda.LaunchKernel(lane.sums[static_cast<int>(sum->word)], blocks, 1, 1,
                                   threads, 1, 1, 0, stream, parameters, nullptr),
        "cuLaunchKernel");
  }
  lane.stream = stream;
  // Also behind those before one that failed.
  const Status recorded =
      library_.Check(library_.cuda.EventRecord(lane.last, stream), "cuEventRecord");
  lane.is_lost |= recorded.failure();
  return status.failure() ? status : recorded;
}

void OneShot::Stop() {
  is_stopped_ = true;
  if (shared_ != nullptr) __atomic_store_n(&shared_->stop, 1u, __ATOMIC_RELEASE);
}

}  // namespace jaxcomm
