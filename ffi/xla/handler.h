// The XLA FFI handlers behind all custom calls.
#ifndef JAXCOMM_FFI_XLA_HANDLER_H_
#define JAXCOMM_FFI_XLA_HANDLER_H_

#include "xla/ffi/api/c_api.h"

namespace jaxcomm {

// Parses the attributes of a custom call into a CallSite, which XLA keeps with
// the compiled program.
XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* call_frame);

// Finds the communicator of the call site and takes part for one rank. For CPU devices.
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* call_frame);

// Likewise for the halves of a collective, "jaxcomm.<name>.start" and "jaxcomm.done".
XLA_FFI_Error* StartHandler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* DoneHandler(XLA_FFI_CallFrame* call_frame);

// ExecuteHandler on a device's stream: returns once that has been given the work.
XLA_FFI_Error* EnqueueHandler(XLA_FFI_CallFrame* call_frame);

// The same, and XLA may record what is enqueued in a command buffer (a CUDA graph).
XLA_FFI_Error* EnqueueCapturableHandler(XLA_FFI_CallFrame* call_frame);

// The halves of a collective on a device's stream.
XLA_FFI_Error* EnqueueStartHandler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* EnqueueDoneHandler(XLA_FFI_CallFrame* call_frame);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_XLA_HANDLER_H_
