#include "ffi/xla/borrow.h"

#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/core/registry.h"
#include "ffi/xla/arrival.h"
#include "ffi/xla/lender.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {
namespace {

namespace ffi = xla::ffi;

Status RefuseUnlessLent(const CallSite& site, const Borrowed* wanted) {
  if (wanted != nullptr) return OkStatus();
  return FailedPrecondition(site.ToString(), " over axes ", site.attributes().axes,
                            ": its communicator is not one that XLA lends");
}

Status Prepare(CallSite* site, const ffi::ErrorOr<Lender>& xla, ffi::RemainingArgs,
               ffi::RemainingRets) {
  if (!xla) return xla.error();
  const auto communicator = Registry::Get().Find(site->attributes().key);
  if (communicator == nullptr) return Registry::Get().MissingError(*site);
  const Borrowed* const wanted = communicator->borrowed();
  RETURN_IF_ERROR(RefuseUnlessLent(*site, wanted));
  return xla->Request(wanted->groups, wanted->communication_id);
}

Status Enqueue(void* stream, CallSite* site, const ffi::ErrorOr<Lender>& xla,
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

XLA_FFI_DEFINE_HANDLER(kPrepare, Prepare,
                       ffi::Ffi::BindPrepare()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<Lender>()
                           .RemainingArgs()
                           .RemainingRets());
XLA_FFI_DEFINE_HANDLER(kEnqueue, Enqueue,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<Lender>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets());

}  // namespace

BorrowHandlers GetBorrowHandlers() { return {kPrepare, kEnqueue}; }

}  // namespace jaxcomm
