#include "ffi/backends/nccl/nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>
#include <utility>
#include <vector>

namespace jaxcomm {
namespace {

constexpr size_t kScratchBytes = 4096;
// Where ranks' cards arrive.
constexpr size_t kCardsAt = 1024;
static_assert(kCardsAt + OneShotArguments::kMostRanks * sizeof(OneShot::Card) <=
              kScratchBytes);

}  // namespace

Status NcclCommunicator::MakeRanks() {
  const auto& devices = how_.world->devices();
  for (size_t i = 0; i < devices.size(); ++i) {
    // From the beginning, so that what it has is given back if it does not get all.
    const auto& made =
        ranks_.emplace_back(std::make_unique<Rank>(library_, recorder()));
    made->place = i;
    made->device = devices[i].id;
    made->ordinal = devices[i].ordinal;
    made->context = how_.world->context(i);
    for (size_t group = 0; group < spec().groups.size(); ++group) {
      const auto& of = spec().groups[group];
      const auto found = std::find(of.begin(), of.end(), devices[i].id);
      if (found == of.end()) continue;
      made->group = static_cast<int>(group);
      made->rank = static_cast<int>(found - of.begin());
      made->size = static_cast<int>(of.size());
    }
    if (made->size == 0) {
      return InvalidArgument("device ", devices[i].id, " is in no group of axes ",
                             spec().axes);
    }
    CurrentContext current(library_.cuda, made->context);
    if (Status status = library_.Check(library_.cuda.StreamCreateWithPriority(
                                           &made->stream, cuda::kStreamNonBlocking, -1),
                                       "cuStreamCreateWithPriority");
        status.failure()) {
      return status;
    }
    if (Status status = library_.Check(
            library_.cuda.MemAlloc(&made->scratch, kScratchBytes), "cuMemAlloc");
        status.failure()) {
      return status;
    }
    if (Status status = made->in_flight.Prepare(); status.failure()) return status;
  }
  return OkStatus();
}

Status NcclCommunicator::MakeShortcuts() {
  size_t num_ranks = 0;
  for (const auto& group : spec().groups) num_ranks += group.size();
  const bool has_all_ranks = num_ranks == ranks_.size();
  std::vector<PeerMember> members;
  std::vector<cuda::Stream> streams;
  for (const auto& rank : ranks_) {
    members.push_back(
        {rank->group, rank->rank, rank->size, rank->ordinal, rank->context});
    streams.push_back(rank->stream);
  }
  Status status = OkStatus();
  if (how_.on_failure == OnFailure::kPoison) {
    if (!has_all_ranks) {
      return InvalidArgument(
          "CommPolicy(on_failure='poison') needs all devices of axes ", spec().axes,
          " in this process: what an aborted operation has sent to another process is "
          "computed with there. Choose 'raise' or 'exit'");
    }
    CurrentContext current(library_.cuda, ranks_[0]->context);
    void* word = nullptr;
    status = library_.Check(library_.cuda.MemAllocHost(&word, sizeof(*poisoned_)),
                            "cuMemAllocHost");
    if (status.failure()) return status;
    poisoned_ = static_cast<uint32_t*>(word);
    *poisoned_ = 0;
    for (auto& rank : ranks_) {
      status = DeviceKernels::Load(library_, rank->context, &rank->kernels);
      if (status.failure()) return status;
    }
  }
  if (how_.copy_engines && has_all_ranks) {
    status = PeerCopies::Create(library_, recorder(), members, &copies_);
  }
  if (how_.one_shot && status.success()) {
    status = OneShot::Create(library_, members, streams, &one_shot_);
  }
  return status;
}

Status NcclCommunicator::SplitOff() {
  std::vector<int> colors, keys;
  for (const auto& rank : ranks_) {
    // A communicator of one rank would cost memory and do nothing.
    colors.push_back(rank->size > 1 ? rank->group : nccl::kNoColor);
    keys.push_back(rank->rank);
  }
  std::vector<nccl::Comm> comms;
  if (Status status =
          how_.world->Split(colors, keys, how_.settings, how_.patience, &comms);
      status.failure()) {
    return status;
  }
  for (size_t i = 0; i < ranks_.size(); ++i) ranks_[i]->comm = comms[i];
  return OkStatus();
}

NcclCommunicator::Held NcclCommunicator::MeasureHeld() const {
  Held held;
  for (const auto& rank : ranks_) {
    held.used -= FreeDeviceBytes(library_, rank->context);
    if (shares_memory()) continue;
    held.is_told =
        ToldDeviceBytes(library_, rank->comm, nccl::MemStat::kTotal, &held.told) ||
        held.is_told;
  }
  // NCCL counts all that share with the mesh's together.
  if (shares_memory()) held.is_told = how_.world->Tell(&held.told);
  return held;
}

// On the caller's thread, unlike other calls in which NCCL waits: communicators that
// were connected on a thread of their own took 60 ms longer to end when a process was
// killed (two and four H200s, NCCL 2.28.9). So Ctrl-C is seen at the deadline only.
Status NcclCommunicator::WarmUp() {
  std::promise<void> connected;
  std::thread guard([this, end = connected.get_future()] {
    const std::chrono::duration<double> patience(how_.patience.seconds);
    if (end.wait_for(patience) == std::future_status::ready) return;
    FailStuck(Status(
        ErrorCode::kDeadlineExceeded,
        StrCat("the first use of the communicator over axes ", spec().axes, " (lane '",
               spec().lane, "') is not done after ", how_.patience.seconds,
               " s; other processes may not have come to it")));
  });
  Status status = OkStatus();
  {
    // What is still in use the guard aborts one second after the deadline, not before.
    const auto locks = LockAll(/*is_idle=*/false);
    status = Connect();
    if (status.success()) status = ShareInboxes();
  }
  connected.set_value();
  guard.join();
  // Where it was aborted its streams may have come to their ends, too.
  if (failed()) return failure();
  if (status.failure()) FailStuck(status);
  return status;
}

Status NcclCommunicator::InGroup(const std::function<nccl::Result(Rank&)>& call) {
  Status status = OkStatus();
  library_.nccl.GroupStart();
  for (auto& rank : ranks_) {
    if (rank->comm == nullptr || status.failure()) continue;
    CurrentContext current(library_.cuda, rank->context);
    status = library_.Check(call(*rank), "first use", rank->comm);
  }
  Status ended = library_.Check(library_.nccl.GroupEnd(), "first use");
  if (status.success()) status = std::move(ended);
  std::vector<nccl::Comm> comms;
  for (auto& rank : ranks_) comms.push_back(rank->comm);
  if (status.failure()) return status;
  NcclPatience patience = how_.patience;
  patience.interrupted = [this] { return failed() || how_.patience.interrupted(); };
  return WaitUntilReady(library_, comms, patience, "first use");
}

Status NcclCommunicator::WaitForStreams() {
  for (auto& rank : ranks_) {
    while (true) {
      CurrentContext current(library_.cuda, rank->context);
      const cuda::Result result = library_.cuda.StreamQuery(rank->stream);
      if (result == cuda::kSuccess) break;
      if (result != cuda::kNotReady) return library_.Check(result, "first use");
      if (failed()) return failure();
      if (how_.patience.interrupted()) {
        return Status(ErrorCode::kCancelled, "interrupted");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  return OkStatus();
}

Status NcclCommunicator::Connect() {
  Status status = InGroup([&](Rank& rank) {
    void* bytes = reinterpret_cast<void*>(rank.scratch);
    void* more = reinterpret_cast<void*>(rank.scratch + 64);
    const int next = (rank.rank + 1) % rank.size;
    const int last = (rank.rank + rank.size - 1) % rank.size;
    library_.nccl.Send(bytes, 4, nccl::Type::kInt8, next, rank.comm, rank.stream);
    return library_.nccl.Recv(more, 4, nccl::Type::kInt8, last, rank.comm, rank.stream);
  });
  if (status.success()) {
    status = InGroup([&](Rank& rank) {
      void* bytes = reinterpret_cast<void*>(rank.scratch);
      return library_.nccl.AllReduce(bytes, bytes, 1, nccl::Type::kFloat32,
                                     nccl::RedOp::kSum, rank.comm, rank.stream);
    });
  }
  return status.success() ? WaitForStreams() : status;
}

Status NcclCommunicator::ShareInboxes() {
  if (one_shot_ == nullptr) return OkStatus();
  std::vector<Rank*> asked;
  for (auto& rank : ranks_) {
    if (one_shot_->NeedsCards(rank->place)) asked.push_back(rank.get());
  }
  if (asked.empty()) return OkStatus();
  if (Status status = ExchangeCards(asked); status.failure()) return status;
  for (Rank* rank : asked) one_shot_->Open(rank->place);
  if (Status status = ExchangeCards(asked); status.failure()) return status;
  for (Rank* rank : asked) one_shot_->Agree(rank->place);
  return OkStatus();
}

Status NcclCommunicator::ExchangeCards(const std::vector<Rank*>& asked) {
  for (Rank* rank : asked) {
    CurrentContext current(library_.cuda, rank->context);
    if (Status status = library_.Check(
            library_.cuda.MemcpyHtoDAsync(rank->scratch, one_shot_->card(rank->place),
                                          sizeof(OneShot::Card), rank->stream),
            "cuMemcpyHtoDAsync");
        status.failure()) {
      return status;
    }
  }
  Status status = InGroup([&](Rank& rank) {
    if (std::find(asked.begin(), asked.end(), &rank) == asked.end()) {
      return nccl::kSuccess;
    }
    return library_.nccl.AllGather(reinterpret_cast<void*>(rank.scratch),
                                   reinterpret_cast<void*>(rank.scratch + kCardsAt),
                                   sizeof(OneShot::Card), nccl::Type::kInt8, rank.comm,
                                   rank.stream);
  });
  for (Rank* rank : asked) {
    if (status.failure()) return status;
    CurrentContext current(library_.cuda, rank->context);
    status = library_.Check(
        library_.cuda.MemcpyDtoHAsync(
            one_shot_->received_cards(rank->place), rank->scratch + kCardsAt,
            static_cast<size_t>(rank->size) * sizeof(OneShot::Card), rank->stream),
        "cuMemcpyDtoHAsync");
  }
  return status.success() ? WaitForStreams() : status;
}

}  // namespace jaxcomm
