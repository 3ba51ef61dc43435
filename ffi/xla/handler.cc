#include "ffi/xla/handler.h"

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/core/registry.h"
#include "ffi/planners/collectives.h"
#include "ffi/xla/buffers.h"
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
  for (int index = 0; index < kNumCollectives; ++index) {
    const Collective& known = kCollectives[index];
    if (known.name != collective) continue;
    CallSite::Attributes attributes{std::string(collective),
                                    std::string(name),
                                    std::string(axes),
                                    key,
                                    program,
                                    *op,
                                    {params.begin(), params.end()}};
    return std::make_unique<CallSite>(std::move(attributes), index, known.planner,
                                      known.plan_reads_operands_from);
  }
  return ffi::Unexpected(InvalidArgument("unknown collective '", collective, "'"));
}

// What a communicator is asked for: Execute, Start or Done.
using Method = ffi::Future (Communicator::*)(const Call&);

template <Method method>
ffi::Future Execute(CallSite* site, ffi::RunId run_id, int32_t device_id,
                    ffi::ThreadPool pool, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  if (Status status = buffers.Read(site, operands, results); status.failure()) {
    return FailedFuture(std::move(status));
  }
  std::shared_ptr<Communicator> communicator;
  if (Status status = Registry::Get().Find(*site, run_id.run_id, &communicator);
      status.failure()) {
    return FailedFuture(std::move(status));
  }
  XlaScheduler scheduler(std::move(pool));
  return (communicator.get()->*method)(
      Call{site, run_id.run_id, site->serial(), site->shared_tag(), device_id,
           buffers.operands(), buffers.results(), &scheduler});
}

// One of the ways of giving a stream work.
template <Status (Communicator::*kGive)(const Call&, void*), bool may_be_captured>
Status Give(void* stream, CallSite* site, ffi::RunId run_id, int32_t ordinal,
            ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  RETURN_IF_ERROR(buffers.Read(site, operands, results));
  std::shared_ptr<Communicator> communicator;
  RETURN_IF_ERROR(Registry::Get().Find(*site, run_id.run_id, &communicator));
  return (communicator.get()->*kGive)(
      Call{site, run_id.run_id, site->serial(), site->shared_tag(), ordinal,
           buffers.operands(), buffers.results(), nullptr, nullptr, may_be_captured},
      stream);
}

XLA_FFI_DEFINE_HANDLER(InstantiateImpl, Instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("collective")
                           .Attr<std::string_view>("name")
                           .Attr<std::string_view>("axes")
                           .Attr<int64_t>("key")
                           .Attr<int64_t>("program")
                           .Attr<std::string_view>("reduce")
                           .Attr<ffi::Span<const int64_t>>("params"));

auto BindExecute() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<CallSite>>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets();
}

XLA_FFI_DEFINE_HANDLER(ExecuteImpl, Execute<&Communicator::Execute>, BindExecute());
XLA_FFI_DEFINE_HANDLER(StartImpl, Execute<&Communicator::Start>, BindExecute());
XLA_FFI_DEFINE_HANDLER(DoneImpl, Execute<&Communicator::Done>, BindExecute());

auto BindStream() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::State<CallSite>>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets();
}

XLA_FFI_DEFINE_HANDLER(EnqueueImpl, (Give<&Communicator::Enqueue, false>),
                       BindStream());
XLA_FFI_DEFINE_HANDLER(EnqueueCapturableImpl, (Give<&Communicator::Enqueue, true>),
                       BindStream(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(EnqueueStartImpl, (Give<&Communicator::EnqueueStart, false>),
                       BindStream());
XLA_FFI_DEFINE_HANDLER(EnqueueDoneImpl, (Give<&Communicator::EnqueueDone, false>),
                       BindStream());

}  // namespace

XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* call_frame) {
  return InstantiateImpl(call_frame);
}

XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* call_frame) {
  return ExecuteImpl(call_frame);
}

XLA_FFI_Error* StartHandler(XLA_FFI_CallFrame* call_frame) {
  return StartImpl(call_frame);
}

XLA_FFI_Error* DoneHandler(XLA_FFI_CallFrame* call_frame) {
  return DoneImpl(call_frame);
}

XLA_FFI_Error* EnqueueHandler(XLA_FFI_CallFrame* call_frame) {
  return EnqueueImpl(call_frame);
}

XLA_FFI_Error* EnqueueCapturableHandler(XLA_FFI_CallFrame* call_frame) {
  return EnqueueCapturableImpl(call_frame);
}

XLA_FFI_Error* EnqueueStartHandler(XLA_FFI_CallFrame* call_frame) {
  return EnqueueStartImpl(call_frame);
}

XLA_FFI_Error* EnqueueDoneHandler(XLA_FFI_CallFrame* call_frame) {
  return EnqueueDoneImpl(call_frame);
}

}  // namespace jaxcomm
