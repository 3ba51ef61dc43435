#include "ffi/xla/handler.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/base/pointer_list.h"
#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/core/dtype.h"
#include "ffi/core/plan.h"
#include "ffi/core/registry.h"
#include "ffi/planners/collectives.h"
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

Leaf LeafOf(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return Leaf{buffer.element_type(),
              {dims.begin(), dims.end()},
              static_cast<int64_t>(buffer.element_count()),
              ElementBytes(buffer.element_type())};
}

// One rank's arrival at a call site: its buffers are read and its communicator is
// found.
class Arrival {
 public:
  Arrival(CallSite* site, int64_t run_id, int64_t device_id,
          const ffi::RemainingArgs& operands, const ffi::RemainingRets& results)
      : operands_(operands.size()), results_(results.size()) {
    call.site = site;
    call.run_id = run_id;
    call.device_id = device_id;
    status = ReadAndFind(operands, results);
    call.tag = site->serial();
    call.shared_tag = site->shared_tag();
    call.operands = operands_.data();
    call.results = results_.data();
  }

  Status status;  // why the rank cannot take part
  std::shared_ptr<Communicator> communicator;
  Call call;

 private:
  // Fixes the shapes of the call site at its first call.
  Status ReadAndFind(const ffi::RemainingArgs& operands,
                     const ffi::RemainingRets& results) {
    const bool first = !call.site->has_shapes();
    std::vector<Leaf> operand_leaves, result_leaves;
    for (size_t i = 0; i < operands.size(); ++i) {
      auto buffer = operands.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      operands_[i] = buffer->untyped_data();
      if (first) operand_leaves.push_back(LeafOf(*buffer));
    }
    for (size_t i = 0; i < results.size(); ++i) {
      auto buffer = results.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      results_[i] = (*buffer)->untyped_data();
      if (first) result_leaves.push_back(LeafOf(**buffer));
    }
    if (first) {
      call.site->SetShapes(std::move(operand_leaves), std::move(result_leaves));
    }
    ASSIGN_OR_RETURN(communicator, Registry::Get().Find(*call.site, call.run_id));
    return OkStatus();
  }

  PointerList<const void, 16> operands_;
  PointerList<void, 16> results_;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(
    std::string_view collective, std::string_view name, std::string_view axes,
    int64_t key, int64_t program, std::string_view reduce,
    ffi::Span<const int64_t> params, std::string_view part_of) {
  const std::optional<ReduceOp> op = ParseReduceOp(reduce);
  if (!op.has_value()) {
    return ffi::Unexpected(InvalidArgument("unknown reduction '", reduce, "'"));
  }
  const Collective* const known = FindCollective(collective);
  if (known == nullptr) {
    return ffi::Unexpected(InvalidArgument("unknown collective '", collective, "'"));
  }
  return std::make_unique<CallSite>(CallSite::Attributes{std::string(name),
                                                         std::string(axes),
                                                         key,
                                                         program,
                                                         *op,
                                                         {params.begin(), params.end()},
                                                         std::string(part_of)},
                                    *known);
}

ffi::Future Execute(CallSite* site, ffi::RunId run_id, int32_t device_id,
                    ffi::ThreadPool pool, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  Arrival arrival(site, run_id.run_id, device_id, operands, results);
  if (arrival.status.failure()) return FailedFuture(std::move(arrival.status));
  XlaScheduler scheduler(std::move(pool));
  arrival.call.scheduler = &scheduler;
  return arrival.communicator->Execute(arrival.call);
}

// Ends a split-phase collective, whose start has completed with the results.
ffi::Future Done(CallSite* site, ffi::RunId run_id, int32_t device_id, ffi::ThreadPool,
                 ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Arrival arrival(site, run_id.run_id, device_id, operands, results);
  if (arrival.status.failure()) return FailedFuture(std::move(arrival.status));
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetAvailable();
  return future;
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
                           .Attr<ffi::Span<const int64_t>>("params")
                           .Attr<std::string_view>("part_of"));

XLA_FFI_DEFINE_HANDLER(kExecute, Execute, BindExecute());
XLA_FFI_DEFINE_HANDLER(kDone, Done, BindExecute());

XLA_FFI_DEFINE_HANDLER(kEnqueue, Enqueue<&Communicator::Enqueue>, BindStream());
XLA_FFI_DEFINE_HANDLER(kEnqueueCapturable, (Enqueue<&Communicator::Enqueue, true>),
                       BindStream(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kEnqueueStart, Enqueue<&Communicator::EnqueueStart>,
                       BindStream());
XLA_FFI_DEFINE_HANDLER(kEnqueueDone, Enqueue<&Communicator::EnqueueDone>, BindStream());

}  // namespace

std::vector<Registration> Registrations(bool has_streams) {
  std::vector<Registration> all;
  const auto add = [&](const std::string& target, XLA_FFI_Handler* execute) {
    all.push_back({target, {{"instantiate", kInstantiate}, {"execute", execute}}});
  };
  for (const Collective* collective : kCollectives) {
    const std::string target = StrCat("jaxcomm.", collective->name());
    add(target, has_streams ? kEnqueue : kExecute);
    add(target + ".start", has_streams ? kEnqueueStart : kExecute);
    if (!has_streams) continue;
    // A graph would send what the numbers said when it was recorded.
    const bool reads = collective->plan_reads_operands_from >= 0;
    add(target + ".capturable", reads ? kEnqueue : kEnqueueCapturable);
  }
  add("jaxcomm.done", has_streams ? kEnqueueDone : kDone);
  return all;
}

}  // namespace jaxcomm
