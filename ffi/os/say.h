// Lines on stderr, which may be a pipe that nobody reads.
#ifndef JAXCOMM_FFI_OS_SAY_H_
#define JAXCOMM_FFI_OS_SAY_H_

#include <future>
#include <string>

namespace jaxcomm {

// Has a thread of its own write a line. The future tells when that is done.
std::shared_future<void> Say(std::string line);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_SAY_H_
