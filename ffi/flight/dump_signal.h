// SIGUSR1 asks for the flight records. A handler in C++ answers even if all threads
// wait in C++, where a handler in Python would not run.
#ifndef JAXCOMM_FFI_FLIGHT_DUMP_SIGNAL_H_
#define JAXCOMM_FFI_FLIGHT_DUMP_SIGNAL_H_

namespace jaxcomm {

// Answers SIGUSR1 from now on, unless the program handles or ignores it. A handler that
// the program sets later replaces ours. Returns whether this process answers.
bool AnswerDumpSignal();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_FLIGHT_DUMP_SIGNAL_H_
