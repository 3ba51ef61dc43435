// How a local communicator's meetings fail: deadlines, closing, and what the ranks
// are told.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ffi/backends/host/local.h"
#include "ffi/flight/flight_dump.h"

namespace jaxcomm {
namespace {

// Late ranks look here; more failed calls than this at once are not remembered.
constexpr size_t kTombstones = 64;

// The notice comes as early as that of a wait for other processes (process_set.cc), or
// after half of a shorter timeout: it must come before the error.
constexpr double kWarnSeconds = 30;

}  // namespace

std::string LocalCommunicator::Where(const Group& group, int rank) const {
  return StrCat("rank ", rank, " of ", group.devices.size(), " (", spec().platform, ":",
                group.devices[rank], ")");
}

Status LocalCommunicator::ReasonNotToWait(Group& group, const Call& call) {
  if (group.closed.failure()) return group.closed;
  for (auto it = group.tombstones.begin(); it != group.tombstones.end(); ++it) {
    if (it->run_id != call.run_id || it->tag != call.tag) continue;
    Status reason = it->reason;
    if (--it->absent == 0) group.tombstones.erase(it);
    return reason;
  }
  return OkStatus();
}

Status LocalCommunicator::Mismatch(Group& group, int rank, const Call& call,
                                   std::unique_lock<std::mutex> lock, Meeting* meeting,
                                   FlightRecorder::Ticket ticket) {
  const Status status = InvalidArgument(
      "over axes ", spec().axes, ": ", Where(group, rank), " called ",
      call.site->ToString(), " where the ranks before it called ", *meeting->label,
      "; every rank must run the same collectives in the same order");
  std::vector<Continuation> failures =
      Fail(group, meeting, {ErrorCode::kInvalidArgument, status.message()});
  // This rank has come, if late.
  (void)ReasonNotToWait(group, call);
  lock.unlock();
  Land(ticket, status);
  DumpFlightRecords("mismatch");
  Continue(std::move(failures), std::make_shared<Gap>());
  return status;
}

std::vector<Continuation> LocalCommunicator::Fail(Group& group, Meeting* meeting,
                                                  const Failure& failure) {
  std::vector<Continuation> failures;
  int absent = 0;
  for (int rank : group.here) {
    Seat& seat = meeting->seats[rank];
    if (seat.state == Seat::kAbsent) ++absent;
    if (seat.state != Seat::kWaiting) continue;
    Settle(seat, Status(failure.code, failure.TextOf(rank)), &failures);
  }
  if (absent > 0) {
    group.tombstones.push_back({meeting->run_id, meeting->tag,
                                Status(failure.code, failure.to_the_late), absent});
    if (group.tombstones.size() > kTombstones) group.tombstones.pop_front();
  }
  Close(group, meeting);
  return failures;
}

std::vector<int64_t> LocalCommunicator::FailedRuns() const {
  std::vector<int64_t> runs;
  for (const auto& group : groups_) {
    std::lock_guard<std::mutex> lock(group->mutex);
    for (const Tombstone& tombstone : group->tombstones) {
      runs.push_back(tombstone.run_id);
    }
    // Some of their ranks were moving bytes when this was closed.
    for (const auto& meeting : group->active) {
      const bool is_whole = meeting->arrived == static_cast<int>(group->here.size());
      if (!is_whole) runs.push_back(meeting->run_id);
    }
  }
  return runs;
}

LocalCommunicator::Failure LocalCommunicator::Timeout(const Group& group,
                                                      const Meeting& meeting) const {
  Failure failure;
  failure.code = ErrorCode::kDeadlineExceeded;
  failure.to_the_late = StrCat(*meeting.label, " over axes ", spec().axes,
                               ": the other ranks stopped waiting for this one after ",
                               spec().timeout_seconds, " s; see JAXCOMM_TIMEOUT.");
  for (size_t rank = 0; rank < meeting.seats.size(); ++rank) {
    failure.to_rank.push_back(TimeoutText(group, meeting, static_cast<int>(rank)));
  }
  if (MayLackThreads(group, meeting)) {
    failure.to_the_late += " " + spec().hint_if_late;
    for (std::string& text : failure.to_rank) text += " " + spec().hint_if_late;
  }
  return failure;
}

bool LocalCommunicator::MayLackThreads(const Group& group,
                                       const Meeting& meeting) const {
  if (spec().hint_if_late.empty()) return false;
  // Nobody waits where pairs are done that needed only each other.
  if (std::none_of(meeting.seats.begin(), meeting.seats.end(),
                   [](const Seat& seat) { return seat.state == Seat::kWaiting; })) {
    return false;
  }
  return std::any_of(group.here.begin(), group.here.end(), [&](int rank) {
    // A rank that waits in another collective has got a thread.
    return meeting.seats[rank].state == Seat::kAbsent &&
           std::none_of(group.active.begin(), group.active.end(),
                        [rank](const auto& other) {
                          return other->seats[rank].state == Seat::kWaiting;
                        });
  });
}

void LocalCommunicator::WarnIfThreadsMayLack(Clock::time_point now) {
  if (has_warned_ || spec().hint_if_late.empty()) return;
  const double after = std::min(kWarnSeconds, spec().timeout_seconds / 2);
  for (auto& group : groups_) {
    std::lock_guard<std::mutex> lock(group->mutex);
    for (const auto& meeting : group->active) {
      const double waited =
          std::chrono::duration<double>(now - meeting->first_arrival).count();
      if (waited <= after || !MayLackThreads(*group, *meeting)) continue;
      has_warned_ = true;
      std::fprintf(
          stderr,
          "jaxcomm: still waiting: %s over axes %s: some ranks of this process "
          "have not come for %.0f s. %s\n",
          meeting->label->c_str(), spec().axes.c_str(), waited,
          spec().hint_if_late.c_str());
      return;
    }
  }
}

std::string LocalCommunicator::TimeoutText(const Group& group, const Meeting& meeting,
                                           int rank) const {
  std::vector<int> missing;
  for (int other : group.here) {
    if (meeting.seats[other].state == Seat::kAbsent) missing.push_back(other);
  }
  std::string text = StrCat(*meeting.label, " over axes ", spec().axes, ": ",
                            Where(group, rank), " waited ", spec().timeout_seconds,
                            " s for rank", missing.size() == 1 ? " " : "s ");
  for (size_t i = 0; i < missing.size(); ++i) {
    text += StrCat(i == 0 ? "" : ", ", missing[i]);
  }
  text += ".";
  bool elsewhere = false;
  for (int other : missing) {
    for (const auto& pending : group.active) {
      if (pending.get() == &meeting || pending->seats[other].state != Seat::kWaiting) {
        continue;
      }
      elsewhere = true;
      text += StrCat(" Rank ", other, " waits in ", *pending->label, " instead.");
      break;
    }
  }
  text += elsewhere ? " Every rank must run the same collectives; a jax.lax.cond on "
                      "axis_index is a usual cause."
                    : " They may have stopped or run a different program;";
  return text + (elsewhere ? " See" : " see") + " JAXCOMM_TIMEOUT.";
}

bool LocalCommunicator::HasWaiting(const Meeting& meeting) {
  const int done = static_cast<int>(meeting.seats.size()) - meeting.left;
  return meeting.arrived > done;
}

bool LocalCommunicator::Poll() {
  const Clock::time_point now = Clock::now();
  WarnIfThreadsMayLack(now);
  const auto timeout = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(spec().timeout_seconds));
  const auto is_late = [&](const Meeting& meeting) {
    return now - meeting.first_arrival > timeout;
  };
  for (auto& group : groups_) {
    {
      std::lock_guard<std::mutex> lock(group->mutex);
      // Where nobody waits, nothing has failed: the ranks that came have their results,
      // and those that are missing need only each other. Should they yet come, they
      // open a meeting of their own.
      std::vector<Meeting*> forgotten;
      bool has_late = false;
      for (const auto& meeting : group->active) {
        if (!is_late(*meeting)) continue;
        if (HasWaiting(*meeting)) {
          has_late = true;
        } else if (meeting->moving == 0) {
          forgotten.push_back(meeting.get());
        }
      }
      for (Meeting* meeting : forgotten) Close(*group, meeting);
      if (!has_late) continue;
    }
    // Before any rank is told, and outside the lock: it writes a file.
    DumpFlightRecords("timeout");
    std::vector<Continuation> failures;
    {
      std::lock_guard<std::mutex> lock(group->mutex);
      std::set<int64_t> failing_runs;
      for (const auto& meeting : group->active) {
        if (is_late(*meeting) && HasWaiting(*meeting)) {
          failing_runs.insert(meeting->run_id);
        }
      }
      // A run that fails in one place fails in all: ranks that wait for each other in
      // two places are told so together. All the texts before any meeting closes, for
      // they name each other.
      std::vector<std::pair<Meeting*, Failure>> expired;
      for (const auto& meeting : group->active) {
        if (meeting->moving == 0 && failing_runs.count(meeting->run_id) > 0) {
          expired.emplace_back(meeting.get(), Timeout(*group, *meeting));
        }
      }
      for (const auto& [meeting, failure] : expired) {
        for (Continuation& continuation : Fail(*group, meeting, failure)) {
          failures.push_back(std::move(continuation));
        }
      }
    }
    Continue(std::move(failures), std::make_shared<Gap>());
  }
  return true;
}

void LocalCommunicator::Abort(const Status& reason) {
  AbortMeetings(reason);
  // Last: see ContinueCrossing().
  if (spec().process_set != nullptr) spec().process_set->Abort(id_, reason);
}

void LocalCommunicator::AbortMeetings(const Status& reason) {
  for (auto& group : groups_) {
    std::vector<Continuation> failures;
    {
      std::lock_guard<std::mutex> lock(group->mutex);
      if (group->closed.success()) group->closed = reason;
      for (size_t i = 0; i < group->active.size();) {
        Meeting* meeting = group->active[i].get();
        if (meeting->moving > 0) {
          ++i;  // its ranks complete by themselves, the last to move fails the rest
          continue;
        }
        for (Continuation& failure :
             Fail(*group, meeting, {*reason.errc(), reason.message()})) {
          failures.push_back(std::move(failure));
        }
      }
    }
    Continue(std::move(failures), std::make_shared<Gap>());
  }
}

}  // namespace jaxcomm
