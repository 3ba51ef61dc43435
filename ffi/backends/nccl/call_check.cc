#include "ffi/backends/nccl/call_check.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

namespace jaxcomm {

struct CallCheck::Announcement {
  uint64_t number = 0;  // counts the rank's calls
  uint64_t signature = 0;
  char text[240] = {};
};

ErrorOr<std::unique_ptr<CallCheck>> CallCheck::Create(NcclParts& parts) {
  auto exchange = std::make_unique<Exchange>(parts, sizeof(Announcement));
  RETURN_IF_ERROR(exchange->Prepare());
  return std::unique_ptr<CallCheck>(new CallCheck(parts, std::move(exchange)));
}

Status CallCheck::Compare(const Call& call, LocalRank& rank) {
  if (rank.facts.size < 2) return OkStatus();
  bool is_refused = true;
  Status status = rank.queue.Launch(call, /*number=*/0, [&] {
    is_refused = false;
    return Announce(call, rank);
  });
  if (status.success()) status = FindOddRanks(rank.facts);
  if (status.success()) return status;
  // Before the failure writes the record: those of all ranks tell who differs.
  rank.queue.Refuse(call);
  if (is_refused) return parts_.health.FailCall(call, rank.facts, status);
  return parts_.health.FailBy(
      call, rank.facts,
      Status(ErrorCode::kInvalidArgument, std::string(status.message())));
}

Status CallCheck::Announce(const Call& call, LocalRank& rank) {
  const size_t place = rank.facts.place;
  Announcement& own = *static_cast<Announcement*>(exchange_->own(place));
  own = Announcement();
  own.number = ++compared_[place];
  own.signature = call.site->signature();
  const std::string& text = call.site->description();
  std::memcpy(own.text, text.data(), std::min(text.size(), sizeof(own.text) - 1));
  const cuda::Stream stream = rank.split_phase.stream();
  RETURN_IF_ERROR(parts_.library.Try(parts_.library.cuda.MemcpyHtoDAsync,
                                     exchange_->own_on_device(place), &own, sizeof(own),
                                     stream));
  RETURN_IF_ERROR(exchange_->Give(rank, sizeof(own), stream));
  return WaitForStream(parts_.library, stream,
                       parts_.health.WhileWell({parts_.spec.timeout_seconds}),
                       "JAXCOMM_CHECK, in which all ranks say what they call,");
}

Status CallCheck::FindOddRanks(const RankFacts& facts) const {
  const auto* const announced = static_cast<const Announcement*>(
      exchange_->sent_by(0, facts.place, sizeof(Announcement)));
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
