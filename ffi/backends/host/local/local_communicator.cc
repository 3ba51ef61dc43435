#include "ffi/backends/host/local/local_communicator.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <string>
#include <utility>

#include "ffi/backends/host/arena/process_set.h"
#include "ffi/backends/host/local/continuer.h"
#include "ffi/backends/host/reduce/store.h"
#include "ffi/core/registry.h"

namespace jaxcomm {
namespace {

namespace ffi = xla::ffi;

// The notice comes as early as that of a wait for other processes (process_set.cc). One
// with a hint comes before the error: after half of a shorter timeout.
constexpr double kWarnSeconds = 30;

// Numbers communicators.
std::atomic<uint64_t> next_id{1};

}  // namespace

LocalCommunicator::LocalCommunicator(CommunicatorSpec spec)
    : Communicator(std::move(spec)),
      context_{this->spec(), recorder(), *this, next_id.fetch_add(1),
               [this](int64_t run_id, const Status& reason) {
                 EndRun(run_id, reason);  // in tests it is in no registry
                 Registry::Get().EndRun(run_id, reason);
               }} {
  for (size_t index = 0; index < this->spec().groups.size(); ++index) {
    GroupMembers members = MembersOf(index);
    if (members.here.empty()) continue;
    auto group = std::make_unique<LocalGroup>(context_, std::move(members));
    for (int rank : group->members().here) {
      members_[group->members().devices[rank]] = {group.get(), rank};
    }
    groups_.push_back(std::move(group));
  }
}

GroupMembers LocalCommunicator::MembersOf(size_t index) const {
  GroupMembers members;
  members.devices = spec().groups[index];
  members.index = index;
  const auto* const processes =
      spec().process_set == nullptr ? nullptr : &spec().processes[index];
  for (int rank = 0; rank < members.size(); ++rank) {
    if (processes != nullptr) {
      if ((*processes)[rank] < 0) continue;  // of another host
      members.processes |= uint64_t{1} << (*processes)[rank];
      if ((*processes)[rank] != spec().process_set->arena().self()) continue;
    }
    members.here.push_back(rank);
  }
  if ((members.processes & (members.processes - 1)) != 0) {
    members.process_of = *processes;
  }
  return members;
}

LocalCommunicator::~LocalCommunicator() {
  // The process set has nothing of ours: what it carries keeps us alive.
  AbortGroups(FailedPrecondition("the communicator was destroyed"));
}

ffi::Future LocalCommunicator::Execute(const Call& call) {
  const auto member = members_.find(call.device_id);
  if (member == members_.end()) {
    return FailedFuture(InvalidArgument(
        call.site->ToString(), " over axes ", spec().axes, ": device ", spec().platform,
        ":", call.device_id,
        " is not part of this communicator. Call jaxcomm.init with the mesh the "
        "program runs on."));
  }
  for (size_t leaf = 0; leaf < call.site->results().size(); ++leaf) {
    AdviseHugePages(call.results[leaf], call.site->results()[leaf].bytes());
  }
  return member->second.group->Execute(member->second.rank, call);
}

void LocalCommunicator::AbortGroups(const Status& reason) {
  for (const auto& group : groups_) group->Abort(reason);
}

void LocalCommunicator::Abort(const Status& reason) {
  AbortGroups(reason);
  // Last: see RoundCarrier::Continue().
  if (spec().process_set != nullptr) spec().process_set->Abort(context_.id, reason);
}

void LocalCommunicator::EndRun(int64_t run_id, const Status& reason) {
  // Other processes wait for the run where it has not come, and would take the next one
  // for it.
  if (spec().process_set != nullptr) spec().process_set->arena().FailAll(reason);
  const Status elsewhere(
      *reason.errc(),
      StrCat("another collective of the program failed: ", reason.message()));
  for (const auto& group : groups_) group->EndRun(run_id, elsewhere);
}

void LocalCommunicator::Interrupt() {
  for (const auto& group : groups_) group->Interrupt(LocalGroup::Clock::now());
  if (spec().process_set != nullptr) spec().process_set->Interrupt();
}

std::vector<int64_t> LocalCommunicator::FailedRuns() const {
  std::vector<int64_t> runs;
  for (const auto& group : groups_) group->AddFailedRuns(&runs);
  return runs;
}

CommunicatorStats LocalCommunicator::stats() const {
  CommunicatorStats stats;
  stats.host_bytes = sizeof(*this);
  std::vector<int64_t> calls(Plan::kKinds, 0);
  for (const auto& group : groups_) group->AddStats(&stats, &calls);
  for (int i = 0; i < Plan::kKinds; ++i) {
    if (calls[i] > 0) stats.calls.emplace_back(KindName(Plan::Kind(i)), calls[i]);
  }
  if (spec().process_set != nullptr) stats.waited_for = spec().process_set->waited();
  return stats;
}

bool LocalCommunicator::Poll() {
  const auto now = LocalGroup::Clock::now();
  WarnIfRanksAreLate(now);
  for (const auto& group : groups_) group->Expire(now);
  return true;
}

void LocalCommunicator::WarnIfRanksAreLate(LocalGroup::Clock::time_point now) {
  if (has_warned_) return;
  const bool has_hint = !HintIfLate(spec()).empty();
  const double half = spec().timeout_seconds / 2;
  const double seconds = has_hint ? std::min(kWarnSeconds, half) : kWarnSeconds;
  for (const auto& group : groups_) {
    const std::string notice = group->Notice(now, seconds);
    if (notice.empty()) continue;
    has_warned_ = true;
    std::fputs(notice.c_str(), stderr);
    return;
  }
}

std::shared_ptr<Communicator> MakeLocalCommunicator(CommunicatorSpec spec) {
  // A timeout is noticed at most a tenth of its length late.
  const double period = std::clamp(spec.timeout_seconds / 10, 0.01, 1.0);
  auto communicator = std::make_shared<LocalCommunicator>(std::move(spec));
  Status status = StartContinuing();
  if (status.success()) status = Watch(communicator, period);
  if (status.failure()) communicator->Abort(status);
  WakeWatchdog();
  return communicator;
}

}  // namespace jaxcomm
