// A flight record as text: JSON for files and Python, lines for a terminal.
#ifndef JAXCOMM_FFI_FLIGHT_FLIGHT_RECORD_FORMAT_H_
#define JAXCOMM_FFI_FLIGHT_FLIGHT_RECORD_FORMAT_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/flight/flight_recorder.h"

namespace jaxcomm {

// Identifies this process in its job.
struct ProcessDescription {
  int process = 0;
  int processes = 1;
  // Global ids of its devices, by platform.
  std::vector<std::pair<std::string, std::vector<int64_t>>> devices;
};

// What a communicator is named by.
struct CommunicatorSummary {
  int64_t key = 0;
  std::string axes;  // "('data', 'context')"
  std::string lane;
  std::string backend;
  std::string platform;  // names devices in messages: "cpu"
  double timeout_seconds = 300;
  std::vector<std::vector<int64_t>> groups;  // global device ids, in rank order
};

struct CommunicatorFlight {
  CommunicatorSummary of;
  bool closed = false;
  std::vector<FlightRecorder::Entry> entries;
};

// Seconds since 1970.
double UnixSeconds();

// The format is documented in jaxcomm/diagnostics/record.py, which reads it. `stacks`:
// of PythonStacks(), or empty.
std::string FlightRecordJson(const ProcessDescription& process, std::string_view reason,
                             const std::vector<CommunicatorFlight>& communicators,
                             std::string_view stacks = "");

// One line per rank: the operation that it waits in, or its last one.
std::string FlightRecordLines(const std::vector<CommunicatorFlight>& communicators);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_FLIGHT_FLIGHT_RECORD_FORMAT_H_
