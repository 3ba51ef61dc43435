// JAXCOMM_CHECK: ranks compare what they are about to do, since NCCL does not.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "ffi/backends/nccl/nccl_communicator.h"

namespace jaxcomm {

// What a rank says of its call.
struct NcclCommunicator::CallCard {
  uint64_t number = 0;  // counts the rank's calls
  uint64_t signature = 0;
  char text[240] = {};
};

Status NcclCommunicator::MakeCallCards() {
  if (!how_.check) return OkStatus();
  for (auto& rank : ranks_) {
    if (rank->size < 2) continue;
    const size_t bytes = static_cast<size_t>(1 + rank->size) * sizeof(CallCard);
    CurrentContext current(library_.cuda, rank->context);
    void* host = nullptr;
    Status status =
        library_.Check(library_.cuda.MemAllocHost(&host, bytes), "cuMemAllocHost");
    if (status.success()) {
      rank->call_cards = static_cast<CallCard*>(host);
      status = library_.Check(
          library_.cuda.MemAlloc(&rank->call_cards_on_device, bytes), "cuMemAlloc");
    }
    if (status.failure()) return status;
  }
  return OkStatus();
}

Status NcclCommunicator::CompareCalls(const Call& call, Rank& rank) {
  Status status = OkStatus();
  {
    // Whatever fails meanwhile takes it for an operation on its way.
    const Counted counted(num_giving_);
    std::lock_guard<std::timed_mutex> lock(rank.launching);
    status = Refusal();
    if (status.success() && is_suspended_) return Suspended(call);
    if (status.success()) {
      CurrentContext current(library_.cuda, rank.context);
      status = ExchangeCallCards(call, rank);
    }
  }
  if (status.success()) status = FindOddRanks(rank);
  if (status.success()) return status;
  return Ended(call, rank, ErrorCode::kInvalidArgument, status.message());
}

Status NcclCommunicator::ExchangeCallCards(const Call& call, Rank& rank) {
  CallCard& own = rank.call_cards[0];
  own = CallCard();
  own.number = ++rank.compared;
  own.signature = call.site->signature();
  const std::string& text = call.site->description();
  std::memcpy(own.text, text.data(), std::min(text.size(), sizeof(own.text) - 1));
  const cuda::Pointer cards = rank.call_cards_on_device;
  Status status = library_.Check(
      library_.cuda.MemcpyHtoDAsync(cards, &own, sizeof(own), rank.stream),
      "cuMemcpyHtoDAsync");
  if (status.success()) {
    status = Settle(
        library_.nccl.AllGather(reinterpret_cast<void*>(cards),
                                reinterpret_cast<void*>(cards + sizeof(own)),
                                sizeof(own), nccl::Type::kInt8, rank.comm, rank.stream),
        rank, "ncclAllGather");
  }
  if (status.success()) {
    status =
        library_.Check(library_.cuda.MemcpyDtoHAsync(
                           rank.call_cards + 1, cards + sizeof(own),
                           static_cast<size_t>(rank.size) * sizeof(own), rank.stream),
                       "cuMemcpyDtoHAsync");
  }
  if (status.failure()) return status;
  const auto end = Clock::now() + Seconds(spec().timeout_seconds);
  while (true) {
    const cuda::Result result = library_.cuda.StreamQuery(rank.stream);
    if (result == cuda::kSuccess) return OkStatus();
    if (result != cuda::kNotReady) return library_.Check(result, "JAXCOMM_CHECK");
    if (failed()) return failure();
    if (Clock::now() > end) {
      return Status(ErrorCode::kDeadlineExceeded,
                    StrCat("JAXCOMM_CHECK: other ranks did not say what they call; ",
                           DescribeLate(spec())));
    }
    std::this_thread::yield();
  }
}

Status NcclCommunicator::FindOddRanks(const Rank& rank) const {
  std::map<std::pair<uint64_t, uint64_t>, int> votes;
  const auto vote = [](const CallCard& card) {
    return std::make_pair(card.number, card.signature);
  };
  for (int each = 0; each < rank.size; ++each) ++votes[vote(rank.call_cards[1 + each])];
  if (votes.size() == 1) return OkStatus();
  // Those of most ranks; of rank 0 where there is no majority.
  auto most = votes.find(vote(rank.call_cards[1]));
  for (auto each = votes.begin(); each != votes.end(); ++each) {
    if (each->second > most->second) most = each;
  }
  std::string odd, others;
  for (int each = 0; each < rank.size; ++each) {
    const CallCard& card = rank.call_cards[1 + each];
    const bool is_odd = vote(card) != most->first;
    std::string& text = is_odd ? odd : others;
    if (!is_odd && !text.empty()) continue;
    text += StrCat(text.empty() ? "" : "; ", "rank ", each, " calls ", card.text,
                   " as its call ", card.number);
  }
  return InvalidArgument("JAXCOMM_CHECK: ranks disagree: ", odd, ", where ", others);
}

}  // namespace jaxcomm
