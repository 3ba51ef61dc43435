#include "ffi/backends/nccl/double_calls.h"

#include <utility>
#include <vector>

namespace jaxcomm {
namespace {

struct Waiting {
  const NcclLibrary& library;
  DoubleCall of;
  Call call;
  std::function<Status(const Call&)> issue;
  std::vector<const void*> operands;
  std::vector<void*> results;
  xla::ffi::Promise promise;

  void Issue() {
    if (Status status = issue(call); status.failure()) return Complete(status);
    const auto done = [](void* waiting, int error) {
      auto* const self = static_cast<Waiting*>(waiting);
      self->Complete(self->library.Check(static_cast<cuda::Result>(error),
                                         "waiting for the stream"));
    };
    library.test_double->when_done(of.stream, done, this);
  }

  void Complete(const Status& status) {
    xla::ffi::Promise told = std::move(promise);
    // Lets go of the communicator first: who is told may close it, and has it end there.
    delete this;
    status.success() ? told.SetAvailable() : told.SetError(status);
  }
};

}  // namespace

xla::ffi::Future IssueInOrder(const NcclLibrary& library, const DoubleCall& of,
                              const Call& call,
                              std::function<Status(const Call&)> issue) {
  auto* const waiting = new Waiting{library, of, call, std::move(issue), {}, {}, {}};
  // The caller's arrays of addresses end with its frame.
  waiting->operands.assign(call.operands, call.operands + call.site->operands().size());
  waiting->results.assign(call.results, call.results + call.site->results().size());
  waiting->call.operands = waiting->operands.data();
  waiting->call.results = waiting->results.data();
  xla::ffi::Future future(waiting->promise);
  library.test_double->arrive(
      of.world, of.member, of.owner, call.run_id, call.site->serial(),
      [](void* argument) { static_cast<Waiting*>(argument)->Issue(); }, waiting);
  return future;
}

}  // namespace jaxcomm
