#include "ffi/xla/borrow.h"

#if __has_include("xla/ffi/api/collectives_api.h")

#include <memory>

#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/core/registry.h"
#include "ffi/xla/buffers.h"
#include "xla/ffi/api/ffi.h"
//
#include "xla/ffi/api/collectives_api.h"

namespace jaxcomm {
namespace {

namespace ffi = xla::ffi;

using XlaCommunicators =
    ffi::internal::CommunicatorContextBase<ffi::internal::ErrorPolicy>;

struct Collectives : ffi::internal::CollectivesExtensionBase<XlaCommunicators> {
  // What we use has been there from the first.
  static bool Support(int32_t major, int32_t) { return major == 0; }
};

Status Find(CallSite* site, std::shared_ptr<Communicator>* communicator) {
  *communicator = Registry::Get().Find(site->attributes().key);
  const bool borrows =
      *communicator != nullptr && (*communicator)->borrowed() != nullptr;
  return borrows ? OkStatus() : Registry::Get().MissingError(*site);
}

Status Prepare(CallSite* site, XlaCommunicators collectives, ffi::RemainingArgs,
               ffi::RemainingRets) {
  std::shared_ptr<Communicator> communicator;
  RETURN_IF_ERROR(Find(site, &communicator));
  const Borrowed& wanted = *communicator->borrowed();
  return collectives.RequestCommunicator(ffi::GroupMode::kFlattenedId, wanted.groups,
                                         wanted.communication_id);
}

Status Enqueue(void* stream, CallSite* site, XlaCommunicators collectives,
               ffi::RunId run_id, int32_t ordinal, ffi::RemainingArgs operands,
               ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  RETURN_IF_ERROR(buffers.Read(site, operands, results));
  std::shared_ptr<Communicator> communicator;
  RETURN_IF_ERROR(Find(site, &communicator));
  const Borrowed& wanted = *communicator->borrowed();
  auto lent = collectives.GetCommunicator(ffi::GroupMode::kFlattenedId, wanted.groups,
                                          wanted.communication_id);
  if (!lent) return lent.error();
  Call call{site,    run_id.run_id,      site->serial(),    site->shared_tag(),
            ordinal, buffers.operands(), buffers.results(), nullptr};
  call.borrowed = *lent;
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
