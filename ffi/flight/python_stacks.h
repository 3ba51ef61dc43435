// What the Python threads of this process do now, for its flight record.
#ifndef JAXCOMM_FFI_FLIGHT_PYTHON_STACKS_H_
#define JAXCOMM_FFI_FLIGHT_PYTHON_STACKS_H_

#include <string>

namespace jaxcomm {

// Descriptors of a Python thread that serves PythonStacks(), see
// jaxcomm/communicator/stacks.py. It reads a byte from a pipe, appends the stacks to a
// file, and answers with a byte in another pipe.
struct StackServer {
  int request = -1;
  int answer = -1;
  int file = -1;
};

void UseStackServer(const StackServer& server);

// Returns the stacks as faulthandler writes them, "" if nobody serves them. Waits half
// a second for the interpreter's lock. If its holder keeps it for so long, no thread
// runs Python, and CPython's own function reads the stacks without the lock.
std::string PythonStacks();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_FLIGHT_PYTHON_STACKS_H_
