// The flight records of this process: when and where they are written.
#ifndef JAXCOMM_FFI_FLIGHT_FLIGHT_DUMP_H_
#define JAXCOMM_FFI_FLIGHT_FLIGHT_DUMP_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "ffi/flight/flight_record_format.h"

namespace jaxcomm {

// Includes a communicator's recorder in the records. Those of the last communicators
// that were closed stay in files: others may still wait for what these did not do.
void FollowFlight(CommunicatorSummary communicator,
                  std::shared_ptr<FlightRecorder> recorder);

// Sets the identity of this process and the folder for files. Empty: write no files.
// `says`: whether lines on stderr name them. Who started the process may read them all.
void PrepareFlightDumps(ProcessDescription process, std::string folder, bool says);

// Returns the record of one communicator, or of all that live, as JSON.
std::string FlightRecordOf(std::optional<int64_t> key, std::string_view reason);

// Writes <folder>/flight-record-<process>.json and one line to stderr. Call this when
// an operation failed, before its ranks return the error: the file is then there when
// the program ends. `reason`: "timeout", "mismatch", ... Writes once for all failures,
// until an operation that began later completes or a communicator is made. A writer
// thread does the work; the caller waits for it, but at most a second. `kExitWell` is
// no failure: nothing is said.
inline constexpr std::string_view kExitWell = "exit";
void DumpFlightRecords(std::string_view reason);

// Writes the file at every call, with the stacks of Python, or lines to stderr if there
// is no folder. Waits at most a second for that.
void AnswerFlightRequest();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_FLIGHT_FLIGHT_DUMP_H_
