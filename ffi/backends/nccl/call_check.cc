#include "ffi/backends/nccl/call_check.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace jaxcomm {

struct CallCheck::Announcement {
  uint64_t number = 0;  // counts the rank's calls
  uint64_t signature = 0;
  char text[240] = {};
};

ErrorOr<std::unique_ptr<CallCheck>> CallCheck::Create(NcclParts& parts) {
  std::unique_ptr<CallCheck> check(new CallCheck(parts));
  const NcclLibrary& library = parts.library;
  for (const auto& rank : parts.ranks) {
    if (rank->facts.size < 2) continue;
    RankState& state = check->states_[rank->facts.place];
    const size_t bytes =
        static_cast<size_t>(1 + rank->facts.size) * sizeof(Announcement);
    CurrentContext current(library.cuda, rank->facts.context);
    void* host = nullptr;
    RETURN_IF_ERROR(library.Try(library.cuda.MemAllocHost, &host, bytes));
    state.announced = static_cast<Announcement*>(host);
    RETURN_IF_ERROR(library.Try(library.cuda.MemAlloc, &state.on_device, bytes));
  }
  return check;
}

CallCheck::~CallCheck() {
  for (const auto& rank : parts_.ranks) {
    const RankState& state = states_[rank->facts.place];
    CurrentContext current(parts_.library.cuda, rank->facts.context);
    if (state.on_device != 0) parts_.library.cuda.MemFree(state.on_device);
    if (state.announced != nullptr) parts_.library.cuda.MemFreeHost(state.announced);
  }
}

Status CallCheck::Compare(const Call& call, LocalRank& rank) {
  if (states_[rank.facts.place].announced == nullptr) return OkStatus();
  bool is_refused = true;
  Status status = rank.queue.Launch(call, /*number=*/0, [&] {
    is_refused = false;
    return Exchange(call, rank);
  });
  if (is_refused) return parts_.health.FailCall(call, rank.facts, status);
  if (status.success()) status = FindOddRanks(rank.facts);
  if (status.success()) return status;
  return parts_.health.FailBy(
      call, rank.facts,
      Status(ErrorCode::kInvalidArgument, std::string(status.message())));
}

Status CallCheck::Exchange(const Call& call, LocalRank& rank) {
  RankState& state = states_[rank.facts.place];
  Announcement& own = state.announced[0];
  own = Announcement();
  own.number = ++state.compared;
  own.signature = call.site->signature();
  const std::string& text = call.site->description();
  std::memcpy(own.text, text.data(), std::min(text.size(), sizeof(own.text) - 1));
  const cuda::Pointer from = state.on_device, to = state.on_device + sizeof(own);
  const cuda::Stream stream = rank.split_phase.stream();
  const nccl::Comm comm = parts_.comms.comm(rank.facts.place);
  RETURN_IF_ERROR(parts_.library.Try(parts_.library.cuda.MemcpyHtoDAsync, from, &own,
                                     sizeof(own), stream));
  const nccl::Result result = parts_.library.nccl.AllGather(
      reinterpret_cast<void*>(from), reinterpret_cast<void*>(to), sizeof(own),
      nccl::Type::kInt8, comm, stream);
  RETURN_IF_ERROR(
      parts_.comms.Finish(result, comm, "ncclAllGather", parts_.spec.timeout_seconds));
  RETURN_IF_ERROR(
      parts_.library.Try(parts_.library.cuda.MemcpyDtoHAsync, state.announced + 1, to,
                         static_cast<size_t>(rank.facts.size) * sizeof(own), stream));
  return Wait(rank);
}

Status CallCheck::Wait(const LocalRank& rank) const {
  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::duration<double> timeout(parts_.spec.timeout_seconds);
  while (true) {
    const cuda::Result result =
        parts_.library.cuda.StreamQuery(rank.split_phase.stream());
    if (result == cuda::kSuccess) return OkStatus();
    if (result != cuda::kNotReady) return parts_.library.Check(result, "JAXCOMM_CHECK");
    if (parts_.health.failed()) return parts_.health.failure();
    if (std::chrono::steady_clock::now() - begin > timeout) {
      return Status(ErrorCode::kDeadlineExceeded,
                    StrCat("JAXCOMM_CHECK: other ranks did not say what they call; ",
                           DescribeLate(parts_.spec)));
    }
    std::this_thread::yield();
  }
}

Status CallCheck::FindOddRanks(const RankFacts& facts) const {
  const Announcement* const announced = states_[facts.place].announced + 1;
  std::map<std::pair<uint64_t, uint64_t>, int> votes;
  const auto vote = [](const Announcement& of) {
    return std::make_pair(of.number, of.signature);
  };
  for (int rank = 0; rank < facts.size; ++rank) ++votes[vote(announced[rank])];
  if (votes.size() == 1) return OkStatus();
  // The call of most ranks is right; that of rank 0 if there is no majority.
  auto most = votes.find(vote(announced[0]));
  for (auto each = votes.begin(); each != votes.end(); ++each) {
    if (each->second > most->second) most = each;
  }
  std::string odd, others;
  for (int rank = 0; rank < facts.size; ++rank) {
    const bool is_odd = vote(announced[rank]) != most->first;
    std::string& text = is_odd ? odd : others;
    if (!is_odd && !text.empty()) continue;
    text += StrCat(text.empty() ? "" : "; ", "rank ", rank, " calls ",
                   announced[rank].text, " as its call ", announced[rank].number);
  }
  return InvalidArgument("JAXCOMM_CHECK: ranks disagree: ", odd, ", where ", others);
}

}  // namespace jaxcomm
