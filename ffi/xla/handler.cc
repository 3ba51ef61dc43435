#include "ffi/xla/handler.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/core/registry.h"
#include "ffi/planners/collectives.h"
#include "ffi/xla/arrival.h"
#include "ffi/xla/lender.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {
namespace {

namespace ffi = xla::ffi;

class XlaScheduler final : public Scheduler {
 public:
  explicit XlaScheduler(ffi::ThreadPool pool) : pool_(std::move(pool)) {}
  int64_t num_threads() const override { return pool_.num_threads(); }
  void Schedule(std::function<void()> task) override {
    pool_.Schedule(std::move(task));
  }

 private:
  ffi::ThreadPool pool_;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(std::string_view collective,
                                                    std::string_view name,
                                                    std::string_view axes, int64_t key,
                                                    int64_t program,
                                                    std::string_view reduce,
                                                    ffi::Span<const int64_t> params) {
  const std::optional<ReduceOp> op = ParseReduceOp(reduce);
  if (!op.has_value()) {
    return ffi::Unexpected(InvalidArgument("unknown reduction '", reduce, "'"));
  }
  const Collective* const known = FindCollective(collective);
  if (known == nullptr) {
    return ffi::Unexpected(InvalidArgument("unknown collective '", collective, "'"));
  }
  return std::make_unique<CallSite>(
      CallSite::Attributes{std::string(name),
                           std::string(axes),
                           key,
                           program,
                           *op,
                           {params.begin(), params.end()}},
      *known);
}

// `method`: of Communicator; Execute, Start or Done.
template <auto method>
ffi::Future Execute(CallSite* site, ffi::RunId run_id, int32_t device_id,
                    ffi::ThreadPool pool, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  Arrival arrival(site, run_id.run_id, device_id, operands, results);
  if (arrival.status.failure()) return FailedFuture(std::move(arrival.status));
  XlaScheduler scheduler(std::move(pool));
  arrival.call.scheduler = &scheduler;
  return ((*arrival.communicator).*method)(arrival.call);
}

// `method`: Enqueue, EnqueueStart or EnqueueDone.
template <auto method, bool may_be_captured = false>
Status Enqueue(void* stream, CallSite* site, ffi::RunId run_id, int32_t ordinal,
               ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Arrival arrival(site, run_id.run_id, ordinal, operands, results);
  RETURN_IF_ERROR(arrival.status);
  arrival.call.may_be_captured = may_be_captured;
  return ((*arrival.communicator).*method)(arrival.call, stream);
}

// On communicators that XLA lends. Fail where it lends none, see lender.h.
Status RefuseUnlessLent(const CallSite& site, const Borrowed* wanted) {
  if (wanted != nullptr) return OkStatus();
  return FailedPrecondition(site.ToString(), " over axes ", site.attributes().axes,
                            ": its communicator is not one that XLA lends");
}

Status PrepareBorrowed(CallSite* site, const ffi::ErrorOr<Lender>& xla,
                       ffi::RemainingArgs, ffi::RemainingRets) {
  if (!xla) return xla.error();
  const auto communicator = Registry::Get().Find(site->attributes().key);
  if (communicator == nullptr) return Registry::Get().MissingError(*site);
  const Borrowed* const wanted = communicator->borrowed();
  RETURN_IF_ERROR(RefuseUnlessLent(*site, wanted));
  return xla->Request(wanted->groups, wanted->communication_id);
}

Status EnqueueBorrowed(void* stream, CallSite* site, const ffi::ErrorOr<Lender>& xla,
                       ffi::RunId run_id, int32_t ordinal, ffi::RemainingArgs operands,
                       ffi::RemainingRets results) {
  if (!xla) return xla.error();
  Arrival arrival(site, run_id.run_id, ordinal, operands, results);
  RETURN_IF_ERROR(arrival.status);
  const Borrowed* const wanted = arrival.communicator->borrowed();
  RETURN_IF_ERROR(RefuseUnlessLent(*site, wanted));
  auto lent = xla->Get(wanted->groups, wanted->communication_id);
  if (!lent) return lent.error();
  arrival.call.borrowed = *lent;
  return arrival.communicator->Enqueue(arrival.call, stream);
}

auto BindExecute() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<CallSite>>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets();
}

auto BindStream() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::State<CallSite>>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets();
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("collective")
                           .Attr<std::string_view>("name")
                           .Attr<std::string_view>("axes")
                           .Attr<int64_t>("key")
                           .Attr<int64_t>("program")
                           .Attr<std::string_view>("reduce")
                           .Attr<ffi::Span<const int64_t>>("params"));

XLA_FFI_DEFINE_HANDLER(kExecute, Execute<&Communicator::Execute>, BindExecute());
XLA_FFI_DEFINE_HANDLER(kStart, Execute<&Communicator::Start>, BindExecute());
XLA_FFI_DEFINE_HANDLER(kDone, Execute<&Communicator::Done>, BindExecute());

XLA_FFI_DEFINE_HANDLER(kEnqueue, Enqueue<&Communicator::Enqueue>, BindStream());
XLA_FFI_DEFINE_HANDLER(kEnqueueCapturable, (Enqueue<&Communicator::Enqueue, true>),
                       BindStream(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kEnqueueStart, Enqueue<&Communicator::EnqueueStart>,
                       BindStream());
XLA_FFI_DEFINE_HANDLER(kEnqueueDone, Enqueue<&Communicator::EnqueueDone>, BindStream());
XLA_FFI_DEFINE_HANDLER(kPrepareBorrowed, PrepareBorrowed,
                       ffi::Ffi::BindPrepare()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<Lender>()
                           .RemainingArgs()
                           .RemainingRets());
XLA_FFI_DEFINE_HANDLER(kEnqueueBorrowed, EnqueueBorrowed,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<Lender>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets());

}  // namespace

std::vector<Registration> Registrations(bool has_streams) {
  std::vector<Registration> all;
  const auto add = [&](const std::string& target, XLA_FFI_Handler* execute) {
    all.push_back({target, {{"instantiate", kInstantiate}, {"execute", execute}}});
  };
  for (const Collective* collective : kCollectives) {
    const std::string target = StrCat("jaxcomm.", collective->name());
    add(target, has_streams ? kEnqueue : kExecute);
    add(target + ".start", has_streams ? kEnqueueStart : kStart);
    if (!has_streams) continue;
    add(target + ".capturable", kEnqueueCapturable);
    add(target + ".borrowed", kEnqueueBorrowed);
    all.back().stages.emplace_back("prepare", kPrepareBorrowed);
  }
  add("jaxcomm.done", has_streams ? kEnqueueDone : kDone);
  return all;
}

}  // namespace jaxcomm
