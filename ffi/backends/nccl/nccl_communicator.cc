#include "ffi/backends/nccl/nccl_communicator.h"

#include <algorithm>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/circumstances.h"
#include "ffi/backends/nccl/double_calls.h"
#include "ffi/os/start_thread.h"

namespace jaxcomm {
namespace {

bool SharesMemory(const NcclSettings& settings) {
  const auto found = settings.numbers.find("splitShare");
  return found != settings.numbers.end() && found->second == 1;
}

LocalRanks MakeRanks(const NcclWorld& world, const CommunicatorSpec& spec,
                     FlightRecorder& recorder, Health& health) {
  LocalRanks ranks;
  for (size_t i = 0; i < world.devices().size(); ++i) {
    RankFacts facts = FindRank(spec.groups, world.devices()[i].id);
    facts.place = i;
    facts.ordinal = world.devices()[i].ordinal;
    facts.context = world.context(i);
    ranks.push_back(
        std::make_unique<LocalRank>(world.library(), facts, recorder, health));
    health.Add(*ranks.back());
  }
  return ranks;
}

// Device memory of the ranks.
struct Held {
  int64_t used = 0;       // by anybody, up to a constant
  int64_t accounted = 0;  // by NCCL to it, or to all that share with the mesh's
  bool is_accounted = false;
};

Held Measure(const NcclWorld& world, const LocalRanks& ranks, const Comms& comms,
             bool shares) {
  Held held;
  for (const auto& rank : ranks) {
    held.used -= FreeDeviceBytes(world.library(), rank->facts.context);
    if (shares) continue;
    held.is_accounted |= comms.AddBytes(*rank, nccl::MemStat::kTotal, &held.accounted);
  }
  // NCCL accounts for communicators that share resources as one.
  if (shares) held.is_accounted = world.AddDeviceBytes(&held.accounted);
  return held;
}

// Keeps what a graph of XLA's refers to, for as long as the process.
void KeepForever(std::shared_ptr<NcclWorld> world) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<NcclWorld>>;
  std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(std::move(world));
}

}  // namespace

NcclCommunicator::NcclCommunicator(CommunicatorSpec spec, NcclSpec how)
    : Communicator(std::move(spec)),
      how_(std::move(how)),
      library_(how_.world->library()),
      number_(NextCommunicatorNumber()),
      health_(this->spec(), library_,
              {how_.world->health(), SharesMemory(how_.settings), how_.on_failure}),
      ranks_(MakeRanks(*how_.world, this->spec(), recorder(), health_)),
      comms_(library_, health_, ranks_, how_.patience),
      nccl_(library_, this->spec(), health_, ranks_, comms_) {
  health_.Add(nccl_);
}

NcclCommunicator::~NcclCommunicator() {
  if (!DevicesAreStopped()) nccl_.ReleaseWindows();
  // A graph that XLA keeps with a compiled program refers to what is freed below, and
  // NCCL would wait for the end of the graph. So would the world, whose child it is.
  if (health_.was_captured()) {
    health_.KeepForever();
    KeepForever(how_.world);
    return;
  }
  if (one_shot_ != nullptr) one_shot_->sums().Leave();
  comms_.End(/*by_force=*/health_.state() == Health::State::kFailed);
  for (const auto& rank : ranks_) {
    CurrentContext current(library_.cuda, rank->facts.context);
    rank->queue.Release();
    rank->split_phase.Release();
  }
  comms_.Release();
  if (check_ != nullptr) check_->Release(ranks_);
}

bool NcclCommunicator::shares_memory() const { return SharesMemory(how_.settings); }

// ---- making
// ---------------------------------------------------------------------------

Status NcclCommunicator::Make() {
  health_.SetOwner(shared_from_this());
  std::vector<int> colors, keys;
  for (const auto& rank : ranks_) {
    const RankFacts& facts = rank->facts;
    if (facts.size == 0) {
      return InvalidArgument("device ", facts.device, " is in no group of axes ",
                             spec().axes);
    }
    CurrentContext current(library_.cuda, facts.context);
    RETURN_IF_ERROR(rank->split_phase.Prepare());
    RETURN_IF_ERROR(rank->queue.Prepare());
    // A communicator of one rank would cost memory and do nothing.
    colors.push_back(facts.size > 1 ? facts.group : nccl::kNoColor);
    keys.push_back(facts.rank);
  }
  RETURN_IF_ERROR(comms_.Prepare());
  RETURN_IF_ERROR(MakeEngines());
  const Held before = Measure(*how_.world, ranks_, comms_, shares_memory());
  std::vector<nccl::Comm> comms;
  RETURN_IF_ERROR(
      how_.world->Split(colors, keys, how_.settings, how_.patience, &comms));
  comms_.Set(comms);
  RETURN_IF_ERROR(WarmUp());
  const Held after = Measure(*how_.world, ranks_, comms_, shares_memory());
  device_bytes_ = after.is_accounted ? after.accounted - before.accounted
                                     : std::max<int64_t>(0, after.used - before.used);
  if (one_shot_ != nullptr) device_bytes_ += one_shot_->device_bytes();
  RETURN_IF_ERROR(health_.BeWatched());
  return OkStatus();
}

Status NcclCommunicator::MakeEngines() {
  size_t num_ranks = 0;
  for (const auto& group : spec().groups) num_ranks += group.size();
  const bool has_all_ranks = num_ranks == ranks_.size();
  std::vector<RankFacts> facts;
  std::vector<cuda::Stream> streams;
  std::vector<cuda::Context> contexts;
  for (const auto& rank : ranks_) {
    facts.push_back(rank->facts);
    streams.push_back(rank->split_phase.stream());
    contexts.push_back(rank->facts.context);
  }
  if (how_.on_failure == OnFailure::kPoison) {
    if (!has_all_ranks) {
      return InvalidArgument(
          "CommPolicy(on_failure='poison') needs all devices of axes ", spec().axes,
          " in this process: what an aborted operation has sent to another process is "
          "computed with there. Choose 'raise' or 'exit'");
    }
    std::unique_ptr<Poison> poison;
    RETURN_IF_ERROR(Poison::Create(library_, contexts, &poison));
    health_.Add(std::move(poison));
  }
  if (how_.copy_engines && has_all_ranks) {
    std::unique_ptr<PeerCopies> copies;
    RETURN_IF_ERROR(PeerCopies::Create(library_, recorder(), facts, &copies));
    if (copies != nullptr) {
      for (const auto& rank : ranks_) {
        rank->queue.Follow(copies->in_flight(rank->facts.place));
      }
      copy_ = std::make_unique<CopyEngine>(library_, spec(), health_, std::move(copies),
                                           nccl_);
      health_.Add(*copy_);
    }
  }
  if (how_.one_shot) {
    std::unique_ptr<OneShot> sums;
    RETURN_IF_ERROR(OneShot::Create(library_, facts, streams, &sums));
    one_shot_ = std::make_unique<OneShotEngine>(library_, std::move(sums));
    health_.Add(*one_shot_);
  }
  return how_.check
             ? CallCheck::Create(library_, spec(), health_, ranks_, comms_, &check_)
             : OkStatus();
}

// On the caller's thread, unlike other calls in which NCCL waits: communicators that
// were connected on a thread of their own took 60 ms longer to end when a process was
// killed (two and four H200s, NCCL 2.28.9). So Ctrl-C is seen at the deadline only.
Status NcclCommunicator::WarmUp() {
  std::promise<void> connected;
  std::thread guard;
  RETURN_IF_ERROR(StartThread(
      [this, end = connected.get_future()] {
        const std::chrono::duration<double> patience(how_.patience.seconds);
        if (end.wait_for(patience) == std::future_status::ready) return;
        health_.FailStuck(
            Status(ErrorCode::kDeadlineExceeded,
                   StrCat("the first use of the communicator over axes ", spec().axes,
                          " (lane '", spec().lane, "') is not done after ",
                          how_.patience.seconds,
                          " s; other processes may not have come to it")));
      },
      &guard));
  Status status = OkStatus();
  {
    // The guard aborts what is still in use, after the deadline and not before.
    const auto locks = health_.LockAll(/*wait_until_idle=*/false);
    status = comms_.Connect();
    if (status.success() && one_shot_ != nullptr) {
      status = one_shot_->ShareInboxes(comms_, ranks_);
    }
  }
  connected.set_value();
  guard.join();
  // Where it was aborted its streams may have come to their ends, too.
  if (health_.failed()) return health_.failure();
  if (status.failure()) health_.FailStuck(status);
  return status;
}

// ---- calls
// ----------------------------------------------------------------------------

RecipeOf NcclCommunicator::RecipeFor(const RankFacts& facts) const {
  return {number_, facts.size, facts.rank, copy_ != nullptr};
}

EngineChoice NcclCommunicator::ChooseFor(const CallFacts& facts, size_t place) const {
  EngineTopology topology;
  topology.can_copy = copy_ != nullptr;
  if (one_shot_ != nullptr) {
    topology.can_add = one_shot_->sums().takes_part(place);
    topology.sums_left = one_shot_->sums().sums_left(place);
  }
  return Choose(facts, {how_.copy_engines, how_.one_shot}, topology);
}

Status NcclCommunicator::FindRank(const Call& call, cuda::Stream stream,
                                  LocalRank** rank) {
  *rank = FindByOrdinal(ranks_, call.device_id);
  if (*rank == nullptr) return NotOfCommunicator(call);
  SplitPhase& split_phase = (*rank)->split_phase;
  // Every engine refuses calls once the devices are stopped.
  if (!split_phase.IsOfNewRun(call) || DevicesAreStopped()) return OkStatus();
  CurrentContext current(library_.cuda, (*rank)->facts.context);
  return split_phase.WaitForEarlierRuns(call, stream);
}

Status NcclCommunicator::FindEngine(const Call& call, bool may_wait, Request* request) {
  LocalRank& rank = *request->rank;
  // One thread issues the calls of several CPU devices, and may not wait in the first.
  if (check_ != nullptr && (may_wait || ranks_.size() == 1)) {
    RETURN_IF_ERROR(check_->Compare(call, rank));
  }
  if (Status status =
          FindRecipe(library_, *call.site, RecipeFor(rank.facts), &request->recipe);
      status.failure()) {
    rank.queue.Refuse(call);
    return status;
  }
  CallFacts facts = request->recipe->facts;
  facts.may_be_captured = call.may_be_captured;
  facts.may_wait = may_wait;
  facts.is_symmetric = copy_ != nullptr && nccl_.IsSymmetric(call, rank);
  switch (ChooseFor(facts, rank.facts.place).kind) {
    case EngineKind::kNccl:
      request->engine = &nccl_;
      break;
    case EngineKind::kCopy:
      request->engine = copy_.get();
      break;
    case EngineKind::kOneShot:
      request->engine = one_shot_.get();
      break;
  }
  return OkStatus();
}

Status NcclCommunicator::Enqueue(const Call& call, void* stream) {
  Request request;
  RETURN_IF_ERROR(FindRank(call, stream, &request.rank));
  RETURN_IF_ERROR(FindEngine(call, /*may_wait=*/true, &request));
  return request.engine->Enqueue(call, *request.recipe, *request.rank, stream);
}

Status NcclCommunicator::EnqueueStart(const Call& call, void* stream) {
  Request request;
  RETURN_IF_ERROR(FindRank(call, stream, &request.rank));
  RETURN_IF_ERROR(FindEngine(call, /*may_wait=*/true, &request));
  CurrentContext current(library_.cuda, request.rank->facts.context);
  if (copy_ != nullptr && request.engine != copy_.get()) {
    RETURN_IF_ERROR(copy_->Forget(call, *request.rank, stream));
  }
  return request.engine->Start(call, *request.recipe, *request.rank, stream);
}

Status NcclCommunicator::EnqueueDone(const Call& call, void* stream) {
  LocalRank* rank = nullptr;
  RETURN_IF_ERROR(FindRank(call, stream, &rank));
  bool is_begun = false;
  if (copy_ != nullptr) {
    Status status = copy_->Done(call, *rank, stream, &is_begun);
    if (is_begun) return status;
  }
  CurrentContext current(library_.cuda, rank->facts.context);
  // The other engines start calls on the rank's own stream, whichever they are.
  Status status = nccl_.Done(call, *rank, stream, &is_begun);
  if (is_begun) return status;
  return FailedPrecondition(
      call.site->description(),
      ": no collective was begun that gives its result here; XLA may have copied the "
      "buffer in between. Use the function without _start and _done");
}

xla::ffi::Future NcclCommunicator::Execute(const Call& call) {
  const auto found = std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
    return rank->facts.device == call.device_id;
  });
  if (library_.test_double == nullptr || found == ranks_.end()) {
    return FailedFuture(NotOfCommunicator(call));
  }
  LocalRank* const rank = found->get();
  const cuda::Stream stream = rank->split_phase.stream();
  auto future = IssueInOrder(
      library_,
      {how_.world->health().get(), &health_, rank->facts.place, stream,
       shared_from_this()},
      call, [this, rank, stream](const Call& issued) {
        Request request{rank};
        RETURN_IF_ERROR(FindEngine(issued, /*may_wait=*/false, &request));
        return request.engine->Enqueue(issued, *request.recipe, *rank, stream);
      });
  if (health_.failed()) health_.Abandon();
  return future;
}

void NcclCommunicator::Abort(const Status& reason) {
  const KeptContext kept(library_.cuda);
  health_.Close(reason);
}

Status NcclCommunicator::Explain(CallSite& site, EngineChoice* choice) {
  const RankFacts& facts = ranks_[0]->facts;
  const Recipe* recipe = nullptr;
  RETURN_IF_ERROR(FindRecipe(library_, site, RecipeFor(facts), &recipe));
  *choice = ChooseFor(recipe->facts, facts.place);
  return OkStatus();
}

// ---- memory
// ---------------------------------------------------------------------------

int64_t NcclCommunicator::DeviceBytesNow() const {
  const bool is_suspended = health_.state() == Health::State::kSuspended;
  if (!is_suspended && (shares_memory() || health_.failed())) return device_bytes_;
  int64_t bytes = one_shot_ == nullptr ? 0 : one_shot_->device_bytes();
  for (const auto& rank : ranks_) {
    const bool is_accounted = comms_.AddBytes(
        *rank, is_suspended ? nccl::MemStat::kPersist : nccl::MemStat::kTotal, &bytes);
    if (!is_accounted && !is_suspended) return device_bytes_;
  }
  return bytes;
}

CommunicatorStats NcclCommunicator::stats() const {
  CommunicatorStats stats = StatsOf(ranks_);
  const std::string reason = one_shot_ == nullptr ? "" : one_shot_->sums().reason();
  stats.one_shot = one_shot_ == nullptr ? "no: not asked for"
                   : reason.empty()     ? "yes"
                                        : StrCat("no: ", reason);
  stats.device_bytes = DeviceBytesNow();
  stats.is_suspended = health_.state() == Health::State::kSuspended;
  stats.host_bytes = recorder().host_bytes();
  return stats;
}

Status NcclCommunicator::Register(const std::shared_ptr<SymmetricMemory>& memory,
                                  std::string* how) {
  for (const auto& rank : ranks_) {
    const RankFacts& facts = rank->facts;
    if (facts.size < 2 || memory->data(facts.ordinal) != nullptr) continue;
    return InvalidArgument("device ", facts.device, " of the communicator over axes ",
                           spec().axes, " has no part of this symmetric memory");
  }
  // Shared, since NCCL may come back after this function does.
  const auto found = std::make_shared<std::string>();
  RETURN_IF_ERROR(health_.RunPatiently(
      "registering symmetric memory", how_.patience, [this, memory, found] {
        const auto locks = health_.LockAll(/*wait_until_idle=*/false);
        return health_.failed() ? health_.failure()
                                : nccl_.Register(*memory, how_.patience, found.get());
      }));
  memory->AddRegistrar(
      std::shared_ptr<SymmetricMemory::Registrar>(shared_from_this(), &nccl_));
  *how = *found;
  return OkStatus();
}

Status NcclCommunicator::SuspendOrResume(bool suspend) {
  return health_.RunPatiently(suspend ? "suspending" : "resuming", how_.patience,
                              [this, suspend] { return SuspendNow(suspend); });
}

Status NcclCommunicator::SuspendNow(bool suspend) {
  const nccl::Api& api = library_.nccl;
  if (api.CommSuspend == nullptr || api.CommResume == nullptr) {
    return FailedPrecondition("NCCL ", library_.VersionText(),
                              " cannot suspend a communicator; 2.29.7 and newer can");
  }
  if (shares_memory()) {
    return FailedPrecondition(
        "the communicator over axes ", spec().axes, " (lane '", spec().lane,
        "') shares its memory with the mesh's, which NCCL does not suspend; make it "
        "with CommPolicy(share=False)");
  }
  // Operations in flight come to their ends. Once there are none, none joins.
  const auto locks = health_.LockAll(/*wait_until_idle=*/suspend);
  if (health_.failed()) return health_.failure();
  if ((health_.state() == Health::State::kSuspended) == suspend) return OkStatus();
  // Ctrl-C is seen by the thread that waits for this one.
  RETURN_IF_ERROR(
      comms_.InGroup(suspend ? "ncclCommSuspend" : "ncclCommResume",
                     {how_.patience.seconds}, [&](LocalRank&, nccl::Comm comm) {
                       return suspend ? api.CommSuspend(comm, nccl::kSuspendMemory)
                                      : api.CommResume(comm);
                     }));
  health_.SetSuspended(suspend);
  return OkStatus();
}

Status MakeNcclCommunicator(CommunicatorSpec spec, NcclSpec how,
                            std::shared_ptr<Communicator>* communicator) {
  const std::shared_ptr<NcclWorld> world = how.world;
  const NcclLibrary& library = world->library();
  const KeptContext kept(library.cuda);
  if (const std::string field = how.settings.Unknown(library); !field.empty()) {
    return InvalidArgument("NCCL ", library.VersionText(), " has no setting '", field,
                           "'; leave it out or install a newer NCCL");
  }
  auto made = std::make_shared<NcclCommunicator>(std::move(spec), std::move(how));
  if (Status status = made->Make(); status.failure()) {
    return WithCircumstances(library, status, world->context(0));
  }
  *communicator = std::move(made);
  return OkStatus();
}

}  // namespace jaxcomm
