#include "ffi/backends/nccl/engines/one_shot_engine.h"

#include <utility>

namespace jaxcomm {

Status OneShotEngine::Enqueue(const Call& call, const Recipe& recipe, LocalRank& rank,
                              cuda::Stream stream) {
  InFlight::Told told;
  const auto launch = [&]() -> Status {
    const size_t place = rank.facts.place;
    const uint32_t left = kernels_->works_left(place);
    auto launched = kernels_->Launch(recipe.kernels, call, place, stream);
    if (kernels_->works_left(place) != left) rank.queue.MayWait();
    ASSIGN_OR_RETURN(told, std::move(launched));
    return OkStatus();
  };
  // What poisons results comes behind the kernel, which says nothing of it.
  RETURN_IF_ERROR(rank.queue.Give(call, stream, rank.queue.Record(call), launch,
                                  parts_.health.has_poison() ? nullptr : &told));
  rank.queue.counts().Add(*call.site, CallCounts::Kind::kOneShot);
  return OkStatus();
}

}  // namespace jaxcomm
