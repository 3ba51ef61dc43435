// How communicators come to be: from a unique id, or by splitting another.
#include <algorithm>

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/communicator.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/group.h"
#include "tests/doubles/nccl/operation.h"
#include "tests/doubles/nccl/room.h"
#include "tests/doubles/nccl/settings.h"

namespace jaxcomm::fake {
namespace {

// Each process has GPUs of its own.
bool SameGpu(const Member& a, const Member& b) {
  return a.device == b.device && a.process.pid == b.process.pid;
}

nccl::Result RefuseDuplicates(const Board& board) {
  if (MultiRankGpu()) return nccl::kSuccess;
  for (int a = 0; a < board.size; ++a) {
    for (int b = a + 1; b < board.size; ++b) {
      if (!SameGpu(board.members[a], board.members[b])) continue;
      return Failure(nccl::kInvalidUsage,
                     "Duplicate GPU detected : rank " + std::to_string(a) +
                         " and rank " + std::to_string(b) + " both on CUDA device " +
                         std::to_string(board.members[a].device));
    }
  }
  return nccl::kSuccess;
}

// Waits in the room until all ranks are there.
nccl::Result WaitForAll(Communicator& communicator) {
  Room& room = *communicator.room;
  Room::Lock lock(room);
  Board& board = room.board();
  if (board.size == 0) board.size = communicator.size;
  if (board.size != communicator.size) {
    room.Fail(nccl::kInvalidArgument,
              "Ranks disagree about their number: " + std::to_string(board.size) +
                  " against " + std::to_string(communicator.size));
    return Failure(static_cast<nccl::Result>(board.failure), board.failure_text);
  }
  Member& member = board.members[communicator.rank];
  if (member.state != Member::kAbsent) {
    room.Fail(nccl::kInvalidUsage,
              "Rank " + std::to_string(communicator.rank) + " came twice");
  }
  // Nobody is counted after a failure, so that where all were counted any failure comes
  // from what others have called since.
  if (board.failure == nccl::kSuccess) {
    member = {Member::kHere, communicator.device, ThisProcess()};
    ++board.joined;
    room.Ring();
  }
  while (board.joined < board.size) {
    if (board.failure != nccl::kSuccess) {
      return Failure(static_cast<nccl::Result>(board.failure), board.failure_text);
    }
    if (communicator.Stopped()) {
      member.state = Member::kLeft;
      return Failure(nccl::kInternalError, "The communicator was aborted");
    }
    room.Wait(&lock, /*notices_death=*/true);
  }
  return RefuseDuplicates(board);
}

nccl::Result Join(Communicator& communicator, const nccl::UniqueId& id, bool hangs) {
  std::shared_ptr<Room> room;
  nccl::Result result = Room::Find(id, &room);
  if (result != nccl::kSuccess) return result;
  {
    std::lock_guard<std::mutex> lock(communicator.mutex);
    communicator.room = room;
  }
  if (hangs) {
    Room::Lock lock(*room);
    while (!communicator.Stopped()) room->Wait(&lock);
    return Failure(nccl::kInternalError, "The communicator was aborted");
  }
  result = WaitForAll(communicator);
  Room::Forget(id);
  return result == nccl::kSuccess ? communicator.Occupy() : result;
}

// Ends a job of a communicator that was made in the foreground.
nccl::Result Ready(Communicator& communicator, nccl::Result result) {
  if (result == nccl::kSuccess) communicator.SetState(result, "");
  return result;
}

void Register(const std::shared_ptr<Communicator>& communicator, nccl::Comm* comm) {
  *comm = Communicators().Add(communicator);
  communicator->number = Number(*comm);
}

// Meets the other ranks of `parent`, and goes on with those of the same color in the
// room of the first.
nccl::Result Split(const std::shared_ptr<Communicator>& parent, uint64_t meeting,
                   int color, int key, Communicator* child, bool hangs) {
  Posted mine{};
  mine.kind = kSplit;
  mine.root = color;
  mine.op = key;
  nccl::Result result = nccl::kSuccess;
  if (child != nullptr) result = Room::Create(&mine.child);
  if (result != nccl::kSuccess) return result;
  std::vector<Posted> all;
  const auto stopped = [&] {
    return parent->resources->aborted() || (child != nullptr && child->Stopped());
  };
  result = MeetOnHost(parent->room.get(), parent->rank, meeting, mine, stopped, &all);
  if (child == nullptr) return result;

  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    if (all[static_cast<size_t>(rank)].root == color) ranks.push_back(rank);
  }
  const auto posted = [&all](int rank) -> const Posted& {
    return all[static_cast<size_t>(rank)];
  };
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int a, int b) { return posted(a).op < posted(b).op; });
  const bool leads = !ranks.empty() && ranks.front() == parent->rank;
  if (!leads) Room::Forget(mine.child);
  if (result != nccl::kSuccess) return result;
  child->size = static_cast<int>(ranks.size());
  child->rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), parent->rank) -
                                 ranks.begin());
  return Join(*child, posted(ranks.front()).child, hangs);
}

nccl::Result Split(nccl::Comm comm, int color, int key, nccl::Comm* newcomm,
                   const nccl::Config* config, bool hangs) {
  if (newcomm == nullptr) return Failure(nccl::kInvalidArgument, "newcomm is null");
  *newcomm = nullptr;
  using nccl::kSuccess;
  JAXCOMM_FAKE_FIND(parent, comm);
  if (color < 0 && color != nccl::kNoColor) {
    return Failure(nccl::kInvalidArgument, "Invalid color " + std::to_string(color));
  }
  nccl::Config child_config = parent->config;
  const nccl::Result result = ReadConfig(config, &child_config);
  if (result != nccl::kSuccess) return result;
  const uint64_t meeting = ++parent->meetings;
  if (color == nccl::kNoColor) {
    Job job;
    job.run = [=] { return Split(parent, meeting, color, key, nullptr, hangs); };
    if (!IsBlocking(parent->config)) job.background = parent;
    return Submit(std::move(job));
  }
  auto child = std::make_shared<Communicator>();
  child->config = child_config;
  child->device = parent->device;
  child->shares = SharesOnSplit(child_config);
  child->resources = child->shares ? parent->resources : std::make_shared<Resources>();
  child->splitting_from = parent->resources;
  auto made = std::make_shared<nccl::Comm>();
  Register(child, made.get());
  Job job;
  job.run = [=] {
    const nccl::Result split =
        Ready(*child, Split(parent, meeting, color, key, child.get(), hangs));
    child->splitting_from = nullptr;
    // Not before, and however it ended, as NCCL does.
    __atomic_store_n(newcomm, *made, __ATOMIC_RELEASE);
    return split;
  };
  if (!IsBlocking(parent->config)) job.background = parent;
  job.undo = [=] {
    Communicators().Remove(*made);
    *newcomm = nullptr;
  };
  return Submit(std::move(job));
}

}  // namespace
}  // namespace jaxcomm::fake

namespace jaxcomm::nccl {

Result ncclGetUniqueId(UniqueId* id) {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclGetUniqueId");
  if (id == nullptr) return fake::Failure(kInvalidArgument, "id is null");
  return fake::Room::Create(id);
}

Result ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank,
                              Config* config) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommInitRankConfig", 0, -1, size, -1, -1, rank,
                    fake::CurrentGroup(), fake::Describe(config));
  const auto fails = [](const std::string& text) {
    return fake::Spoil(fake::Failure(kInvalidArgument, text));
  };
  if (comm == nullptr) return fails("comm is null");
  *comm = nullptr;
  if (size < 1 || size > fake::kMaxRanks || rank < 0 || rank >= size) {
    return fails("Invalid rank requested : " + std::to_string(rank) + "/" +
                 std::to_string(size));
  }
  auto made = std::make_shared<fake::Communicator>();
  const Result result = fake::ReadConfig(config, &made->config);
  if (result != kSuccess) return fake::Spoil(result);
  made->rank = rank;
  made->size = size;
  made->device = fake::RuntimeDevice();
  made->resources = std::make_shared<fake::Resources>();
  fake::Register(made, comm);
  fake::Job job;
  job.run = [made, id, hangs = call.hangs()] {
    return fake::Ready(*made, fake::Join(*made, id, hangs));
  };
  if (!fake::IsBlocking(made->config)) job.background = made;
  job.undo = [comm] {
    fake::Communicators().Remove(*comm);
    *comm = nullptr;
  };
  return fake::Spoil(fake::Submit(std::move(job)));
}

Result ncclCommSplit(Comm comm, int color, int key, Comm* newcomm, Config* config) {
  JAXCOMM_FAKE_CALL(kForbidden, "ncclCommSplit", fake::Number(comm), -1, -1, -1, key,
                    color, fake::CurrentGroup(), fake::Describe(config));
  return fake::Spoil(fake::Split(comm, color, key, newcomm, config, call.hangs()));
}

}  // namespace jaxcomm::nccl
