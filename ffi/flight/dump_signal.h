// SIGUSR1 asks for the flight records, also of a process whose threads all wait in C++,
// where a signal handler written in Python would not run.
#ifndef JAXCOMM_FFI_FLIGHT_DUMP_SIGNAL_H_
#define JAXCOMM_FFI_FLIGHT_DUMP_SIGNAL_H_

namespace jaxcomm {

// Answers SIGUSR1 from now on, unless somebody else handles or ignores it: whoever sets
// a handler, earlier or later, keeps it. Returns whether this process answers.
bool AnswerDumpSignal();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_FLIGHT_DUMP_SIGNAL_H_
