// The flight records of this process: all its recorders, and when and where they are
// written.
#ifndef JAXCOMM_FFI_FLIGHT_FLIGHT_DUMP_H_
#define JAXCOMM_FFI_FLIGHT_FLIGHT_DUMP_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "ffi/flight/flight_record_format.h"

namespace jaxcomm {

// Includes a communicator's recorder in the records for as long as it lives.
void FollowFlight(CommunicatorSummary communicator,
                  std::weak_ptr<FlightRecorder> recorder);

// Says who this process is, and the folder for files; empty: none are written.
void PrepareFlightDumps(ProcessDescription process, std::string folder);

// The record of one communicator, or of all, as JSON.
std::string FlightRecordOf(std::optional<int64_t> key, std::string_view reason);

// Call this when an operation failed, before the ranks of this process are told, so
// that the file is there when a program ends with the error. `reason`: "timeout",
// "mismatch"
// ... Writes <folder>/flight-record-<process>.json and one line to stderr, once for all
// failures until an operation that began later completes. A thread of its own does the
// writing; the caller waits for it, but at most a second.
void DumpFlightRecords(std::string_view reason);

// Writes the file however often it is called, with the same patience; without a folder,
// lines to stderr.
void AnswerFlightRequest();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_FLIGHT_FLIGHT_DUMP_H_
