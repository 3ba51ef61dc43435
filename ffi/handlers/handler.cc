#include "ffi/handlers/handler.h"

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/call_site.h"
#include "ffi/communicator.h"
#include "ffi/handlers/collectives.h"
#include "ffi/registry.h"
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

// Buffer pointers of one call: on the stack for the usual handful of leaves.
template <typename Pointer>
class Pointers {
 public:
  explicit Pointers(size_t count) {
    if (count > kInline) heap_.resize(count);
    data_ = count > kInline ? heap_.data() : inline_;
  }
  Pointer& operator[](size_t i) { return data_[i]; }
  Pointer* data() { return data_; }

 private:
  static constexpr size_t kInline = 16;
  Pointer inline_[kInline];
  std::vector<Pointer> heap_;
  Pointer* data_;
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

ffi::Future Execute(CallSite* site, ffi::RunId run_id, int32_t device_id,
                    ffi::ThreadPool pool, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  Pointers<const void*> operand_data(operands.size());
  Pointers<void*> result_data(results.size());
  const bool first = !site->has_shapes();
  std::vector<Leaf> operand_leaves, result_leaves;
  for (size_t i = 0; i < operands.size(); ++i) {
    auto buffer = operands.get<ffi::AnyBuffer>(i);
    if (!buffer) return FailedFuture(buffer.error());
    operand_data[i] = buffer->untyped_data();
    if (first) operand_leaves.push_back(LeafOf(*buffer));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (!buffer) return FailedFuture(buffer.error());
    result_data[i] = (*buffer)->untyped_data();
    if (first) result_leaves.push_back(LeafOf(**buffer));
  }
  if (first) site->SetShapes(std::move(operand_leaves), std::move(result_leaves));

  const std::shared_ptr<Communicator> communicator =
      Registry::Get().Find(site->attributes().key);
  if (communicator == nullptr) {
    return FailedFuture(Registry::Get().MissingError(*site));
  }
  XlaScheduler scheduler(std::move(pool));
  return communicator->Execute(Call{site, run_id.run_id, site->serial(),
                                    site->shared_tag(), device_id, operand_data.data(),
                                    result_data.data(), &scheduler});
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

XLA_FFI_DEFINE_HANDLER(ExecuteImpl, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets());

}  // namespace

XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* call_frame) {
  return InstantiateImpl(call_frame);
}

XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* call_frame) {
  return ExecuteImpl(call_frame);
}

}  // namespace jaxcomm
