#include "ffi/handlers/borrow.h"

#if __has_include("xla/ffi/api/collectives_api.h")

#include <memory>

#include "ffi/backends/nccl/borrowed_communicator.h"
#include "ffi/call_site.h"
#include "ffi/handlers/buffers.h"
#include "ffi/registry.h"
#include "xla/ffi/api/ffi.h"
//
#include "xla/ffi/api/collectives_api.h"

namespace jaxcomm {
namespace {

namespace ffi = xla::ffi;

class XlaCommunicators
    : public ffi::internal::CommunicatorContextBase<ffi::internal::ErrorPolicy> {
 public:
  using Extension = XLA_FFI_Collectives_Extension;

  XlaCommunicators(const XLA_FFI_Api* api, const Extension* extension)
      : CommunicatorContextBase(api, extension),
        minor_(extension->extension_base.id.minor_version) {}

  // Asks for the buffers to be registered with a communicator that was asked for.
  Status RequestWindows(const BorrowedCommunicator::Wanted& wanted,
                        ffi::RemainingArgs operands, ffi::RemainingRets results) {
#if XLA_FFI_Extension_Collectives_MinorVersion >= 2
    if (minor_ < 2) return OkStatus();
    std::vector<ffi::CollectiveMemoryRegion> regions;
    for (size_t i = 0; i < operands.size(); ++i) {
      const auto buffer = operands.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      regions.push_back({buffer->untyped_data(), buffer->size_bytes(), 1});
    }
    for (size_t i = 0; i < results.size(); ++i) {
      const auto buffer = results.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      regions.push_back({(*buffer)->untyped_data(), (*buffer)->size_bytes(), 1});
    }
    return RequestWindow(ffi::GroupMode::kFlattenedId, wanted.groups,
                         wanted.communication_id, regions);
#else
    return OkStatus();
#endif
  }

  // Whether all buffers of a call lie in windows.
  bool HasWindows(const BorrowedCommunicator::Wanted& wanted, const Call& call) {
#if XLA_FFI_Extension_Collectives_MinorVersion >= 2
    if (minor_ < 2) return false;
    const auto has = [&](const void* buffer) {
      auto found = GetWindow(ffi::GroupMode::kFlattenedId, wanted.groups,
                             wanted.communication_id, buffer);
      if (getenv("JXW")) fprintf(stderr, "window %p: %s %p\n", buffer, found ? "ok" : found.error().message().c_str(), found ? (void*)found->window : nullptr);
      return found && found->window != nullptr;
    };
    bool all = true;
    for (size_t i = 0; i < call.site->operands().size(); ++i) {
      all = has(call.operands[i]) && all;
    }
    for (size_t i = 0; i < call.site->results().size(); ++i) {
      all = has(call.results[i]) && all;
    }
    return all;
#else
    return false;
#endif
  }

 private:
  [[maybe_unused]] const int32_t minor_;
};

struct Collectives : ffi::internal::CollectivesExtensionBase<XlaCommunicators> {
  // Communicators have been there from the first.
  static bool Support(int32_t major, int32_t) { return major == 0; }
};

Status Find(CallSite* site, std::shared_ptr<BorrowedCommunicator>* communicator) {
  *communicator = std::dynamic_pointer_cast<BorrowedCommunicator>(
      Registry::Get().Find(site->attributes().key));
  return *communicator == nullptr ? Registry::Get().MissingError(*site) : OkStatus();
}

Status Prepare(CallSite* site, XlaCommunicators collectives,
               ffi::RemainingArgs operands, ffi::RemainingRets results) {
  std::shared_ptr<BorrowedCommunicator> communicator;
  if (Status status = Find(site, &communicator); status.failure()) return status;
  const auto& wanted = communicator->wanted();
  Status status = collectives.RequestCommunicator(
      ffi::GroupMode::kFlattenedId, wanted.groups, wanted.communication_id);
  if (status.success() && getenv("JXW")) {
    status = collectives.RequestWindows(wanted, operands, results);
    fprintf(stderr, "request: %s\n", status.success() ? "ok" : status.message().c_str());
    if (status.failure()) status = OkStatus();
  }
  return status;
}

Status Enqueue(void* stream, CallSite* site, XlaCommunicators collectives,
               ffi::RunId run_id, int32_t ordinal, ffi::RemainingArgs operands,
               ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  if (Status status = buffers.Read(site, operands, results); status.failure()) {
    return status;
  }
  std::shared_ptr<BorrowedCommunicator> communicator;
  if (Status status = Find(site, &communicator); status.failure()) return status;
  const auto& wanted = communicator->wanted();
  auto lent = collectives.GetCommunicator(ffi::GroupMode::kFlattenedId, wanted.groups,
                                          wanted.communication_id);
  if (!lent) return lent.error();
  Call call{site,    run_id.run_id,      site->serial(),    site->shared_tag(),
            ordinal, buffers.operands(), buffers.results(), nullptr};
  call.borrowed = *lent;
  if (getenv("JXW")) collectives.HasWindows(wanted, call);
  return communicator->Enqueue(call, stream);
}

XLA_FFI_DEFINE_HANDLER(PrepareImpl, Prepare,
                       ffi::Ffi::BindPrepare()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .RemainingArgs()
                           .RemainingRets());
XLA_FFI_DEFINE_HANDLER(EnqueueImpl, Enqueue,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets());

}  // namespace

BorrowHandlers GetBorrowHandlers() {
  return {[](XLA_FFI_CallFrame* frame) { return PrepareImpl(frame); },
          [](XLA_FFI_CallFrame* frame) { return EnqueueImpl(frame); }};
}

}  // namespace jaxcomm

#else

namespace jaxcomm {

BorrowHandlers GetBorrowHandlers() { return {}; }

}  // namespace jaxcomm

#endif
