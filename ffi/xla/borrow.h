// Collectives on communicators that XLA lends.
#ifndef JAXCOMM_FFI_XLA_BORROW_H_
#define JAXCOMM_FFI_XLA_BORROW_H_

#include "xla/ffi/api/c_api.h"

namespace jaxcomm {

// Null where the FFI this was built with has no extension for collectives, which jaxlib
// has from 0.11.2 on.
struct BorrowHandlers {
  XLA_FFI_Handler* prepare = nullptr;  // says which communicator it will need
  XLA_FFI_Handler* execute = nullptr;  // gives a device's stream the work
};
BorrowHandlers GetBorrowHandlers();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_XLA_BORROW_H_
