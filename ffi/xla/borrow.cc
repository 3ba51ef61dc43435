#include "ffi/xla/borrow.h"

#if __has_include("xla/ffi/api/collectives_api.h")

#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/core/registry.h"
#include "ffi/xla/arrival.h"
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

Status RefuseUnlessLent(const CallSite& site, const WantedCommunicator* wanted) {
  if (wanted != nullptr) return OkStatus();
  return FailedPrecondition(site.ToString(), " over axes ", site.attributes().axes,
                            ": its communicator is not one that XLA lends");
}

Status Prepare(CallSite* site, XlaCommunicators collectives, ffi::RemainingArgs,
               ffi::RemainingRets) {
  const auto communicator = Registry::Get().Find(site->attributes().key);
  if (communicator == nullptr) return Registry::Get().MissingError(*site);
  const WantedCommunicator* const wanted = communicator->wanted();
  RETURN_IF_ERROR(RefuseUnlessLent(*site, wanted));
  return collectives.RequestCommunicator(ffi::GroupMode::kFlattenedId, wanted->groups,
                                         wanted->communication_id);
}

Status Enqueue(void* stream, CallSite* site, XlaCommunicators collectives,
               ffi::RunId run_id, int32_t ordinal, ffi::RemainingArgs operands,
               ffi::RemainingRets results) {
  Arrival arrival(site, run_id.run_id, ordinal, operands, results);
  RETURN_IF_ERROR(arrival.status);
  const WantedCommunicator* const wanted = arrival.communicator->wanted();
  RETURN_IF_ERROR(RefuseUnlessLent(*site, wanted));
  auto lent = collectives.GetCommunicator(ffi::GroupMode::kFlattenedId, wanted->groups,
                                          wanted->communication_id);
  if (!lent) return lent.error();
  arrival.call.borrowed = *lent;
  return arrival.communicator->Enqueue(arrival.call, stream);
}

XLA_FFI_DEFINE_HANDLER(kPrepare, Prepare,
                       ffi::Ffi::BindPrepare()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .RemainingArgs()
                           .RemainingRets());
XLA_FFI_DEFINE_HANDLER(kEnqueue, Enqueue,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets());

}  // namespace

BorrowHandlers GetBorrowHandlers() { return {kPrepare, kEnqueue}; }

}  // namespace jaxcomm

#else

namespace jaxcomm {

BorrowHandlers GetBorrowHandlers() { return {}; }

}  // namespace jaxcomm

#endif
