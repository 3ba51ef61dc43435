#include "ffi/backends/nccl/nccl_communicator.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/failure/patience.h"
#include "ffi/base/keep_forever.h"
#include "ffi/core/watchdog.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

// Its device's memory is freed once the device has done all that was begun, which the
// watchdog may have to end.
void End(NcclCommunicator* communicator) {
  if (!IsWatchdog()) {
    delete communicator;
    return;
  }
  // If there is no thread, it stays until the process ends.
  (void)StartDetached([communicator] { delete communicator; }, "jaxcomm-end");
}

}  // namespace

NcclCommunicator::NcclCommunicator(CommunicatorSpec spec, NcclSpec how)
    : Communicator(std::move(spec)),
      how_(std::move(how)),
      parts_(this->spec(), how_.world->library(),
             {how_.world->health(), how_.on_failure}, how_.world->devices(),
             how_.world->contexts(), recorder(), how_.patience),
      engines_(parts_, how_.engines),
      memory_(*how_.world, parts_.comms, how_.settings.shares()) {}

NcclCommunicator::~NcclCommunicator() {
  for (const auto& rank : parts_.ranks) rank->runs.Remove(rank.get());
  if (!DevicesAreStopped()) engines_.nccl().ReleaseWindows();
  // A graph that XLA keeps with a compiled program refers to what is freed below, and
  // NCCL would wait for the end of the graph. So would the world, whose child it is.
  if (WereCaptured(parts_.ranks)) {
    parts_.health.KeepPoison();
    KeepForever(how_.world);
    KeepForever(std::move(check_));
    return;
  }
  engines_.Leave();
  parts_.comms.End(/*by_force=*/parts_.health.ends_by_force());
  for (const auto& rank : parts_.ranks) {
    CurrentContext current(parts_.library.cuda, rank->facts.context);
    rank->queue.Release();
    rank->split_phase.Release();
  }
  parts_.comms.Release();
}

Status NcclCommunicator::Make() {
  parts_.health.SetOwner(shared_from_this());
  RETURN_IF_ERROR(PrepareRanks());
  RETURN_IF_ERROR(parts_.comms.Prepare());
  if (how_.on_failure == OnFailure::kPoison) {
    ASSIGN_OR_RETURN(std::unique_ptr<Poison> poison,
                     Poison::Create(parts_.library, how_.world->contexts().all()));
    parts_.health.Add(std::move(poison));
  }
  RETURN_IF_ERROR(engines_.Make(recorder()));
  if (how_.check) {
    ASSIGN_OR_RETURN(check_, CallCheck::Create(parts_));
  }
  memory_.Begin();
  RETURN_IF_ERROR(Split());
  RETURN_IF_ERROR(Connect());
  memory_.End();
  for (const auto& rank : parts_.ranks) {
    rank->runs.Add(
        rank.get(), [this, each = rank.get()](const Call& call, cuda::Stream stream) {
          CurrentContext current(parts_.library.cuda, each->facts.context);
          RETURN_IF_ERROR(each->split_phase.WaitForEarlierRuns(call, stream));
          return engines_.ForgetEarlierRuns(call, *each, stream);
        });
  }
  return parts_.health.BeWatched();
}

Status NcclCommunicator::PrepareRanks() {
  for (const NcclDevice& device : how_.world->devices()) {
    if (FindByOrdinal(parts_.ranks, device.ordinal) != nullptr) continue;
    return InvalidArgument("device ", device.id, " is in no group of axes ",
                           spec().axes);
  }
  for (const auto& rank : parts_.ranks) {
    CurrentContext current(parts_.library.cuda, rank->facts.context);
    RETURN_IF_ERROR(rank->split_phase.Prepare());
    RETURN_IF_ERROR(rank->queue.Prepare());
  }
  return OkStatus();
}

Status NcclCommunicator::Split() {
  std::vector<int> colors, keys;
  for (const auto& rank : parts_.ranks) {
    const RankFacts& facts = rank->facts;
    // A communicator of one rank would cost memory and do nothing.
    colors.push_back(facts.size > 1 ? facts.group : nccl::kNoColor);
    keys.push_back(facts.rank);
  }
  ASSIGN_OR_RETURN(
      const std::vector<nccl::Comm> comms,
      how_.world->Split(colors, keys, how_.settings, parts_.comms.patience()));
  parts_.comms.Set(comms);
  return OkStatus();
}

// On the caller's thread, unlike other calls in which NCCL waits: communicators that
// were connected on a thread of their own took 60 ms longer to end when a process was
// killed (two and four H200s, NCCL 2.28.9).
Status NcclCommunicator::Connect() {
  const NcclPatience& patience = parts_.comms.patience();
  return RunGuarded(
      parts_.health, "the first use of " + NameOf(spec()), patience, [&]() -> Status {
        ASSIGN_OR_RETURN(const LaunchLocks locks, LockAll(parts_.ranks, patience));
        RETURN_IF_ERROR(parts_.comms.Connect());
        return engines_.Connect();
      });
}

ErrorOr<LocalRank*> NcclCommunicator::FindRank(const Call& call, cuda::Stream stream) {
  LocalRank* const rank = FindByOrdinal(parts_.ranks, call.device_id);
  if (rank == nullptr) return NotOfCommunicator(call);
  // Every engine refuses calls once the devices are stopped.
  if (parts_.health.Refusal().failure()) CameTooLate(call.device_id);
  if (!DevicesAreStopped()) RETURN_IF_ERROR(rank->runs.Begin(call, stream));
  return rank;
}

Status NcclCommunicator::Compare(const Call& call, LocalRank& rank) {
  return check_ == nullptr ? OkStatus() : check_->Compare(call, rank);
}

Status NcclCommunicator::EnqueueOf(const Call& call, LocalRank& rank,
                                   cuda::Stream stream) {
  RETURN_IF_ERROR(Compare(call, rank));
  return engines_.Enqueue(call, rank, stream);
}

Status NcclCommunicator::StartOf(const Call& call, LocalRank& rank,
                                 cuda::Stream stream) {
  RETURN_IF_ERROR(Compare(call, rank));
  return FailIfOfLibrary(call, rank, engines_.Start(call, rank, stream));
}

Status NcclCommunicator::FailIfOfLibrary(const Call& call, const LocalRank& rank,
                                         const Status& status) {
  const bool is_of_library = status.errc() == ErrorCode::kInternal ||
                             status.errc() == ErrorCode::kResourceExhausted;
  return is_of_library ? parts_.health.FailCall(call, rank.facts, status) : status;
}

Status NcclCommunicator::EndRunIfFailed(const Call& call, LocalRank& rank,
                                        cuda::Stream stream, Status status) {
  if (status.failure() && !DevicesAreStopped()) rank.runs.End(call, stream);
  return status;
}

Status NcclCommunicator::Enqueue(const Call& call, void* stream) {
  ASSIGN_OR_RETURN(LocalRank* const rank, FindRank(call, stream));
  return EndRunIfFailed(call, *rank, stream, EnqueueOf(call, *rank, stream));
}

Status NcclCommunicator::EnqueueStart(const Call& call, void* stream) {
  ASSIGN_OR_RETURN(LocalRank* const rank, FindRank(call, stream));
  return EndRunIfFailed(call, *rank, stream, StartOf(call, *rank, stream));
}

Status NcclCommunicator::EnqueueDone(const Call& call, void* stream) {
  ASSIGN_OR_RETURN(LocalRank* const rank, FindRank(call, stream));
  return EndRunIfFailed(
      call, *rank, stream,
      FailIfOfLibrary(call, *rank, engines_.Done(call, *rank, stream)));
}

void NcclCommunicator::Abort(const Status& reason) { parts_.health.Close(reason); }

CommunicatorStats NcclCommunicator::stats() const {
  CommunicatorStats stats = StatsOf(parts_.ranks);
  stats.device_bytes = engines_.device_bytes() +
                       (parts_.health.failed() ? memory_.at_first() : memory_.Now());
  stats.host_bytes = recorder().host_bytes();
  return stats;
}

NcclStats NcclCommunicator::nccl_stats() const {
  using Kind = CallCounts::Kind;
  const CallCounts& counts = parts_.ranks[0]->queue.counts();
  return {counts.of(Kind::kSymmetric), counts.of(Kind::kCopied),
          counts.of(Kind::kOneShot),   counts.of(Kind::kDeviceSized),
          engines_.one_shot_text(),    engines_.copies_text(),
          engines_.device_sizes_text()};
}

ErrorOr<std::string> NcclCommunicator::Register(
    const std::shared_ptr<SymmetricMemory>& memory) {
  for (const auto& rank : parts_.ranks) {
    const RankFacts& facts = rank->facts;
    if (facts.size < 2 || memory->data(facts.ordinal) != nullptr) continue;
    return InvalidArgument("device ", facts.device, " of ", NameOf(spec()),
                           " has no part of this symmetric memory");
  }
  // Shared, since NCCL may come back after this function does.
  const auto found = std::make_shared<std::string>();
  RETURN_IF_ERROR(RunPatiently(
      "registering symmetric memory with ", [this, memory, found]() -> Status {
        ASSIGN_OR_RETURN(const LaunchLocks locks,
                         LockAll(parts_.ranks, parts_.comms.patience()));
        *found = engines_.nccl().Register(*memory);
        return OkStatus();
      }));
  memory->AddRegistrar(
      std::shared_ptr<NcclEngine>(shared_from_this(), &engines_.nccl()));
  return *found;
}

Status NcclCommunicator::RunPatiently(const char* what, std::function<Status()> call) {
  RETURN_IF_ERROR(parts_.health.Refusal());
  return jaxcomm::RunPatiently(parts_.health, shared_from_this(), what + NameOf(spec()),
                               parts_.comms.patience(), std::move(call));
}

ErrorOr<std::shared_ptr<Communicator>> MakeNcclCommunicator(CommunicatorSpec spec,
                                                            NcclSpec how) {
  const std::shared_ptr<NcclWorld> world = how.world;
  const NcclLibrary& library = world->library();
  if (const std::string field = how.settings.Unknown(library); !field.empty()) {
    return InvalidArgument("NCCL ", library.VersionText(), " has no setting '", field,
                           "'; leave it out or install a newer NCCL");
  }
  std::shared_ptr<NcclCommunicator> made(
      new NcclCommunicator(std::move(spec), std::move(how)), End);
  if (Status status = made->Make(); status.failure()) {
    return WithCircumstances(library, status, world->contexts()[0]);
  }
  return made;
}

}  // namespace jaxcomm
