#include "ffi/backends/nccl/nccl_communicator.h"

#include <memory>
#include <utility>
#include <vector>

#include "ffi/backends/host/continuer.h"

namespace jaxcomm {

// For CPU devices, which the stand-in for NCCL serves: on a stream of the rank's own.
xla::ffi::Future NcclCommunicator::Execute(const Call& call) {
  Rank* rank = nullptr;
  for (auto& each : ranks_) {
    if (each->device == call.device_id) rank = each.get();
  }
  if (rank == nullptr) return FailedFuture(NotMine(call));

  struct Waiting {
    std::shared_ptr<NcclCommunicator> communicator;
    xla::ffi::Promise promise;
    std::shared_ptr<Gap> gap;
    std::vector<const void*> operands;
    std::vector<void*> results;
    Call call;
    const Rank* rank = nullptr;

    void Complete(Status status) {
      std::vector<Continuation> all;
      all.push_back({std::move(promise), std::move(status)});
      Continue(std::move(all), gap);
      delete this;
    }
  };
  auto* waiting = new Waiting;
  waiting->communicator =
      std::static_pointer_cast<NcclCommunicator>(Watched::shared_from_this());
  waiting->rank = rank;
  waiting->gap = call.site->gap();
  waiting->operands.assign(call.operands, call.operands + call.site->operands().size());
  waiting->results.assign(call.results, call.results + call.site->results().size());
  waiting->call = call;
  waiting->call.operands = waiting->operands.data();
  waiting->call.results = waiting->results.data();
  xla::ffi::Future future(waiting->promise);
  const auto issue = [rank, waiting] {
    NcclCommunicator& self = *waiting->communicator;
    if (Status status = self.Launch(waiting->call, *rank, rank->stream);
        status.failure()) {
      waiting->Complete(std::move(status));
      return;
    }
    CurrentContext current(self.library_.cuda, rank->context);
    self.library_.cuda.LaunchHostFunc(
        rank->stream,
        [](void* argument) {
          auto* waiting = static_cast<Waiting*>(argument);
          waiting->Complete(
              waiting->communicator->FailureOf(waiting->call, *waiting->rank));
        },
        waiting);
  };
  how_.world->host_order().Arrive(rank->place, this, {call.run_id, call.site->serial()},
                                  issue);
  if (failed()) Abandon();
  return future;
}

}  // namespace jaxcomm
