// Collectives on communicators that XLA lends.
#ifndef JAXCOMM_FFI_XLA_BORROW_H_
#define JAXCOMM_FFI_XLA_BORROW_H_

#include "xla/ffi/api/c_api.h"

namespace jaxcomm {

// Null if this was built with a jaxlib before 0.11.2, whose FFI has no extension for
// collectives.
struct BorrowHandlers {
  XLA_FFI_Handler* prepare = nullptr;  // requests the communicator
  XLA_FFI_Handler* execute = nullptr;  // enqueues the collective
};
BorrowHandlers GetBorrowHandlers();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_XLA_BORROW_H_
