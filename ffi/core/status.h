// For backends/nccl, until it names ffi/base/status.h.
#ifndef JAXCOMM_FFI_CORE_STATUS_H_
#define JAXCOMM_FFI_CORE_STATUS_H_

#include "ffi/base/status.h"

#endif  // JAXCOMM_FFI_CORE_STATUS_H_
