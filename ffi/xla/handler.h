// The XLA FFI handlers behind all custom calls.
#ifndef JAXCOMM_FFI_XLA_HANDLER_H_
#define JAXCOMM_FFI_XLA_HANDLER_H_

#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jaxcomm {

// A custom-call target and its handlers, by the stage that XLA calls them in.
struct Registration {
  std::string target;
  std::vector<std::pair<const char*, XLA_FFI_Handler*>> stages;
};

// Returns the targets of one kind of device. Of each collective:
//   jaxcomm.<name>             takes part in the collective
//   jaxcomm.<name>.start       begins it; "jaxcomm.done" ends it
// With streams also:
//   jaxcomm.<name>.capturable  may be recorded in a command buffer (a CUDA graph)
std::vector<Registration> Registrations(bool has_streams);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_XLA_HANDLER_H_
