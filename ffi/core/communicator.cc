#include "ffi/core/communicator.h"

#include "ffi/flight/flight_dump.h"

namespace jaxcomm {

std::string NameOf(const CommunicatorSpec& spec) {
  return StrCat("the communicator over axes ", spec.axes, " (lane '", spec.lane, "')");
}

Communicator::Communicator(CommunicatorSpec spec)
    : spec_(std::move(spec)),
      recorder_(std::make_shared<FlightRecorder>(spec_.groups)) {
  FollowFlight(spec_, recorder_);
}

xla::ffi::Future Communicator::Execute(const Call& call) {
  return FailedFuture(FailedPrecondition(call.site->description(), ": the ",
                                         spec_.backend,
                                         " backend serves only devices with streams"));
}

Status Communicator::Enqueue(const Call& call, void*) {
  return FailedPrecondition(call.site->description(), ": the ", spec_.backend,
                            " backend does not serve devices with streams");
}

Status Communicator::EnqueueStart(const Call& call, void* stream) {
  return Enqueue(call, stream);
}

Status Communicator::EnqueueDone(const Call&, void*) { return OkStatus(); }

xla::ffi::Future FailedFuture(Status status) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetError(std::move(status));
  return future;
}

}  // namespace jaxcomm
