// Collectives on communicators that XLA lends.
#ifndef JAXCOMM_FFI_XLA_BORROW_H_
#define JAXCOMM_FFI_XLA_BORROW_H_

#include "xla/ffi/api/c_api.h"

namespace jaxcomm {

// They fail where XLA lends none, see lender.h.
struct BorrowHandlers {
  XLA_FFI_Handler* prepare;  // requests the communicator
  XLA_FFI_Handler* execute;  // enqueues the collective
};
BorrowHandlers GetBorrowHandlers();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_XLA_BORROW_H_
