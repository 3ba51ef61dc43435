#include "ffi/os/forked.h"

#include <unistd.h>

namespace jaxcomm {
namespace {

const pid_t loaded_in = getpid();

}  // namespace

bool IsForked() { return getpid() != loaded_in; }

}  // namespace jaxcomm
