// The one pair of XLA FFI handlers behind all custom calls.
#ifndef JAXCOMM_FFI_HANDLERS_HANDLER_H_
#define JAXCOMM_FFI_HANDLERS_HANDLER_H_

#include "xla/ffi/api/c_api.h"

namespace jaxcomm {

// Parses the attributes of a custom call into a CallSite, which XLA keeps with
// the compiled program.
XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* call_frame);

// Finds the communicator of the call site and takes part for one rank.
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* call_frame);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_HANDLERS_HANDLER_H_
