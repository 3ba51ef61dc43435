#include "ffi/communicator.h"

namespace jaxcomm {

xla::ffi::Future FailedFuture(Status status) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetError(std::move(status));
  return future;
}

}  // namespace jaxcomm
