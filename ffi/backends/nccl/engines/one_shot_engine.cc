#include "ffi/backends/nccl/engines/one_shot_engine.h"

namespace jaxcomm {

Status OneShotEngine::Enqueue(const Call& call, const Recipe& recipe, LocalRank& rank,
                              cuda::Stream stream) {
  InFlight::Told told;
  const auto launch = [&]() -> Status {
    ASSIGN_OR_RETURN(told,
                     kernels_->Launch(recipe.kernels, call, rank.facts.place, stream));
    return OkStatus();
  };
  // What poisons results comes behind the kernel, which says nothing of it.
  RETURN_IF_ERROR(rank.queue.Give(call, stream, rank.queue.Record(call), launch,
                                  parts_.health.has_poison() ? nullptr : &told));
  rank.queue.counts().Add(*call.site, CallCounts::Kind::kOneShot);
  return OkStatus();
}

}  // namespace jaxcomm
